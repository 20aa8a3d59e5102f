"""A storage tier for kvtier: a file per block, in a folder that anything may provide."""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from kvtier.core.errors import ConfigError
from kvtier.core.types import BlockKey, BlockName
from kvtier.devices.base import Finding
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import Outcome, StorageFacts, StorageSite, StorageTier

HEADER = struct.Struct("<8s32sQI")
"""Magic, key, length and checksum of the block; its bytes follow."""
MAGIC = b"kvfile 1"
KEY_BYTES = 32


class FileStore(StorageTier):
    """Blocks in files that are called by their keys: ``ab/cd/abcd....kv``.

    A file is written under another name and renamed: it is there in full or not at all. All keys
    are known in memory, so look-ups cost nothing. One process owns the folder.
    """

    facts = StorageFacts(finds_at_once=True, num_readers=4, num_writers=2, sizes_vary=True)

    def __init__(self, site: StorageSite) -> None:
        self.name = site.name
        self.bytes_per_block = site.group.bytes_per_block
        self.folder = Path(site.location)
        self._sizes_vary = site.sizes_vary
        self._num_blocks = site.capacity_bytes // self.bytes_per_block
        if not site.location:
            raise ConfigError(f'{self.name}: no folder; write it as "files:/path"')
        if not self._num_blocks:
            raise ConfigError(
                f"{self.name}: a capacity of {site.capacity_bytes} bytes is below one block "
                f"({self.bytes_per_block}); raise storage_capacity"
            )
        self._owner = _lock(self.folder)
        self._lock = Lock()
        self._kept: set[BlockKey] = set()
        self._writing: set[BlockKey] = set()
        self._unindexed = self._found_in_folder()
        for key in list(self._unindexed)[: -self._num_blocks]:
            self._remove(key)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def has_unindexed(self) -> bool:
        return bool(self._unindexed)

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        with self._lock:
            return [Outcome.THERE if self._hold(key) else Outcome.ABSENT for key in keys]

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        return [self._put(name.key, blocks, at) for at, name in enumerate(names)]

    def _put(self, key: BlockKey, blocks: Pieces, at: int) -> Outcome:
        with self._lock:
            if self._hold(key):
                return Outcome.THERE
            if len(self._kept) + len(self._writing) >= self._num_blocks:
                return Outcome.FAILED
            self._writing.add(key)
            while len(self._kept) + len(self._writing) + len(self._unindexed) > self._num_blocks:
                self._remove(next(iter(self._unindexed)))  # the oldest
        is_written = self._write(key, blocks.read(at))
        with self._lock:
            self._writing.discard(key)
            if is_written:
                self._kept.add(key)
        return Outcome.THERE if is_written else Outcome.FAILED

    def _write(self, key: BlockKey, content: bytes) -> bool:
        path = self._path(key)
        part = path.with_suffix(".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(HEADER.pack(MAGIC, key, len(content), zlib.crc32(content)) + content)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            return False
        return True

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        return [self._get(key, blocks, at) for at, key in enumerate(keys)]

    def _get(self, key: BlockKey, blocks: Pieces, at: int) -> Outcome:
        with self._lock:
            if not self._hold(key):
                return Outcome.ABSENT
        try:
            whole = self._path(key).read_bytes()
        except FileNotFoundError:
            self.drop([key])
            return Outcome.ABSENT
        except OSError:
            return Outcome.FAILED
        content = memoryview(whole)[HEADER.size :]
        right = HEADER.pack(MAGIC, key, len(content), zlib.crc32(content))
        is_short = len(content) < self.bytes_per_block and not self._sizes_vary
        if is_short or len(content) > self.bytes_per_block or whole[: HEADER.size] != right:
            self.drop([key])
            return Outcome.DAMAGED
        blocks.part(0, len(content)).write(at, content)
        return Outcome.THERE

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        with self._lock:
            for key in keys:
                if self._hold(key):
                    self._remove(key)

    def findings(self) -> list[Finding]:
        return [Finding(f"{self.name} tier", f"{self._num_blocks} blocks in {self.folder}")]

    def close(self) -> None:
        os.close(self._owner)

    # -- with the lock held ------------------------------------------------------------------------

    def _hold(self, key: BlockKey) -> bool:
        """Whether there is such a block; it stays from now on."""
        if key in self._unindexed:
            del self._unindexed[key]
            self._kept.add(key)
        return key in self._kept

    def _remove(self, key: BlockKey) -> None:
        self._path(key).unlink(missing_ok=True)  # first: where it fails, it is asked for again
        self._kept.discard(key)
        self._unindexed.pop(key, None)

    # -- the folder --------------------------------------------------------------------------------

    def _path(self, key: BlockKey) -> Path:
        name = key.hex()
        return self.folder / name[:2] / name[2:4] / f"{name}.kv"

    def _found_in_folder(self) -> dict[BlockKey, None]:
        """Blocks of earlier processes, the oldest first; what these left half done goes."""
        for part in self.folder.glob("??/??/*.part"):
            part.unlink()
        files = sorted(self.folder.glob("??/??/*.kv"), key=lambda path: path.stat().st_mtime_ns)
        return {BlockKey(bytes.fromhex(path.stem)): None for path in files if _is_name(path.stem)}


def _is_name(text: str) -> bool:
    return len(text) == 2 * KEY_BYTES and not set(text) - set("0123456789abcdef")


def _lock(folder: Path) -> int:
    """Own the folder until the descriptor is closed, or the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{folder}: can't keep files there: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"{folder}: another process keeps its files there") from error
    return descriptor
