"""A pack file: the packs of a store in one file, with the identity of their KV, and signed.

    magic      8   "kvtierF1"
    zeros      8
    objects        packs, then their manifests, without gaps
    index          JSON, UTF-8: see ``PackFileIndex``; it has the BLAKE3 of each object
    trailer
      magic        8   "kvtierF1"
      size         8   of the index
      digest      32   BLAKE3 of the index
      public key  32   Ed25519; zeros if it is not signed
      signature   64   of all of the trailer above the public key; zeros if it is not signed
      zeros        4
      check        4   crc32c of the trailer above

Numbers are little-endian. Each byte is covered by a digest, or by the check. So one that changes is
found, and the signature holds for all of them.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from struct import Struct
from threading import Lock
from typing import Any, Final
from weakref import finalize

import numpy as np
from blake3 import blake3

from kvtier import __version__
from kvtier.core.errors import ConfigError, LayoutError, printable
from kvtier.identity import GRAIN_NS
from kvtier.layout import Attention, KVGroup, Part
from kvtier.tiers.crc_join import checksum
from kvtier.tiers.remote.bucket.manifests import KEY_BYTES, MAX_BYTES, Manifest, Pack, manifest_path
from kvtier.tiers.remote.bucket.packs import MAX_BLOCKS, PackShape, contents_of, pack_path
from kvtier.tiers.remote.bucket.signing import PUBLIC_BYTES, SIGNATURE_BYTES, Signer, is_signed

MAGIC: Final = b"kvtierF1"
BEGIN: Final = MAGIC.ljust(16, b"\0")
NAMED: Final = Struct("<8sQ32s")
"""Part of the trailer that is signed."""
TRAILER_BYTES: Final = NAMED.size + PUBLIC_BYTES + SIGNATURE_BYTES + 8
CONTEXT: Final = b"kvtier pack file 1\0"
"""Beginning of each signed message: a signature of something else is invalid here."""
FORMAT: Final = 1
MAX_TITLE: Final = 200
MAX_SHOWN: Final = 4
"""Sizes of blocks in a message, at most."""
WRITER: Final = "0" * 16
STAMP: Final = 1
"""Stamp of all packs: clocks of other machines do not matter, and no tombstone is older."""
PACKS_PER_MANIFEST: Final = 1024
PIECE_BYTES: Final = 4 << 20
HEADER_BYTES: Final = PackShape(1, 0).header_bytes(MAX_BLOCKS)
MAX_PACK_BYTES: Final = 1 << 30
"""Largest size of a pack's blocks, decoded. A reader reserves memory for as many."""
FILE_MODE: Final = 0o640
"""Without the bits of the umask. KV tells as much as its prompt does."""
TITLES: Final = {
    "weights": "the weights",
    "made_by": "KV made by",
    "dtype": "the dtype",
    "layout": "the layout",
    "block_size": "block_size",
    "chunk_tokens": "chunk_tokens",
    "codec": "the lossy codec",
}
"""Facts that must be equal for KV to be found, and their names in messages."""

Note = Callable[[int, int], None]
"""Called with the objects that are done, and all objects."""


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """Model and settings that KV belongs to.

    model: name of the model; another name of the same weights does not matter.
    facts: by the names in ``TITLES``.
    namespace: digest of all facts that keys of blocks contain.
    group: content of a block.
    """

    model: str
    facts: Mapping[str, str]
    namespace: bytes
    group: KVGroup

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> KVIdentity:
        """Read what ``as_json`` has written. Raises ``ValueError``, ``TypeError`` and the like."""
        facts = {name: _text(given["facts"][name]) for name in TITLES}
        group = dict(given["group"])
        group["attention"] = Attention(group["attention"])
        group["parts"] = tuple(Part(**part) for part in group["parts"])
        namespace = bytes.fromhex(given["namespace"])
        if len(namespace) != KEY_BYTES:
            raise ValueError("namespace")
        return cls(_text(given["model"]), facts, namespace, KVGroup(**group))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "facts": dict(self.facts), "namespace": self.namespace.hex()}

    def check(self, other: KVIdentity, where: str) -> None:
        """Raise ``ConfigError``, which names both, if KV of ``other`` is of no use for this.

        where: the file of ``other``.
        """
        differ = [
            f"{title} {other.facts[name] or 'none'!r} and not {self.facts[name] or 'none'!r}"
            for name, title in TITLES.items()
            if other.facts[name] != self.facts[name]
        ]
        if differ:
            raise ConfigError(
                f"{where} has KV of {printable(other.model)}, and this is {self.model}: it has "
                f"{', '.join(map(printable, differ))}; export it again with what is served here"
            )


@dataclass(frozen=True, slots=True)
class PackFileIndex:
    """Contents of a pack file.

    about: text that was given when the file was made.
    made_by: kvtier's version.
    identity: of the KV; None for the packs of a store, whose keys tell no model.
    num_prompts, num_tokens: of the prompts; 0 if they are not known.
    blocks: number of blocks by their size, decoded.
    objects: path, size and digest of each, in order.
    """

    about: str
    made_by: str
    identity: KVIdentity | None
    num_prompts: int
    num_tokens: int
    blocks: Mapping[int, int]
    objects: Sequence[tuple[str, int, bytes]]

    def to_bytes(self) -> bytes:
        made = {
            "format": FORMAT,
            "about": self.about,
            "made_by": self.made_by,
            "identity": self.identity and self.identity.as_json(),
            "prompts": self.num_prompts,
            "tokens": self.num_tokens,
            "blocks": sorted(self.blocks.items()),
            "objects": [[path, size, digest.hex()] for path, size, digest in self.objects],
        }
        return json.dumps(made, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> PackFileIndex:
        """Read an index. Raises ``ValueError``, ``TypeError`` and the like for anything else."""
        found = json.loads(content)
        if found["format"] != FORMAT:
            raise ValueError("format")
        identity = found["identity"]
        return cls(
            _text(found["about"]),
            _text(found["made_by"]),
            None if identity is None else KVIdentity.read(identity),
            _number(found["prompts"]),
            _number(found["tokens"]),
            {_number(size): _number(count) for size, count in found["blocks"]},
            [
                (_text(path), _number(size), bytes.fromhex(digest))
                for path, size, digest in found["objects"]
            ],
        )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _number(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise TypeError(value)
    return value


class PackFile:
    """A pack file that is open for reading. Thread-safe.

    index: its index.
    public_key: that it was signed with; b"" for none.
    written_s: time of the file.

    Raises ``ConfigError``, with a sentence, for a file that can't be used. The objects themselves
    are verified by ``verify``.

    required_key: public key that must have signed it; b"" for any or none.
    """

    _verified: Final[set[tuple[int, ...]]] = set()
    """Device, inode, size and time of the files that this process has verified."""
    _lock: Final = Lock()

    def __init__(self, path: Path, required_key: bytes = b"") -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            finalize(self, os.close, self._fd)
            facts = os.fstat(self._fd)
        except OSError as error:
            raise self._refusal(f"{error.strerror}; name a file that kvtier export wrote") from None
        if not stat.S_ISREG(facts.st_mode):
            raise self._refusal("is no file; name one that kvtier export wrote")
        self.written_s = facts.st_mtime
        self._changed_ns = max(facts.st_mtime_ns, facts.st_ctime_ns)
        self._stamp = (facts.st_dev, facts.st_ino, facts.st_size, self._changed_ns)
        self.index, self.public_key = self._read_index(facts.st_size, required_key)
        self._places: dict[str, tuple[int, int]] = {}
        begin = len(BEGIN)
        for name, size, _ in self.index.objects:
            self._places[name] = begin, size
            begin += size

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"pack file {printable(str(self.path))}: {reason}")

    def _read_index(self, size: int, required_key: bytes) -> tuple[PackFileIndex, bytes]:
        trailer_at = size - TRAILER_BYTES
        if trailer_at < len(BEGIN) or self._bytes(0, len(MAGIC)) != MAGIC:
            raise self._refusal("is no pack file; name one that kvtier export wrote")
        trailer = self._bytes(trailer_at, TRAILER_BYTES)
        magic, index_bytes, digest = NAMED.unpack_from(trailer)
        check = int.from_bytes(trailer[-4:], "little")
        if magic != MAGIC or check != checksum(trailer[:-4]) or self._bytes(0, 16) != BEGIN:
            raise self._refusal("is truncated or damaged; copy it again")
        key = trailer[NAMED.size : NAMED.size + PUBLIC_BYTES]
        signature = trailer[NAMED.size + PUBLIC_BYTES : -8]
        self._check_signature(CONTEXT + trailer[: NAMED.size], signature, key, required_key)
        if not 0 < index_bytes <= min(MAX_BYTES, trailer_at - len(BEGIN)):
            raise self._refusal("has an index of an impossible size; make it again")
        content = self._bytes(trailer_at - index_bytes, index_bytes)
        if blake3(content).digest() != digest:
            raise self._refusal("its index is damaged; copy it again")
        try:
            index = PackFileIndex.from_bytes(content)
            paths = {path for path, _, _ in index.objects}
            sizes = sum(num_bytes for _, num_bytes, _ in index.objects)
            if len(paths) < len(index.objects) or len(BEGIN) + sizes + index_bytes != trailer_at:
                raise ValueError("objects")
            # A slab is written by the group's size from memory of the blocks' size.
            if index.identity and index.blocks.keys() != {index.identity.group.bytes_per_block}:
                raise ValueError("blocks")
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, LayoutError):
            raise self._refusal(
                "its index is not understood; it is of another version of kvtier, or forged"
            ) from None
        return index, key if any(key) else b""

    def _check_signature(
        self, message: bytes, signature: bytes, key: bytes, required_key: bytes
    ) -> None:
        if not required_key:
            return
        if not any(key):
            raise self._refusal(
                "is not signed, and public_key asks for a signature; export it with --sign-key"
            )
        if key != required_key:
            raise self._refusal(
                f"is signed with the key {key.hex()[:16]}, and public_key is "
                f"{required_key.hex()[:16]}; ask for a file of that key, or trust this one"
            )
        if not is_signed(message, signature, key):
            raise self._refusal("its signature is wrong: it was changed after it was signed")

    def check_block_bytes(self, block_bytes: int) -> None:
        """Raise ``ConfigError``, which names both sizes, if no block has this size."""
        if block_bytes not in self.index.blocks:
            sizes = ", ".join(f"{size:,}" for size in sorted(self.index.blocks)[:MAX_SHOWN])
            raise self._refusal(
                f"has blocks of {sizes} bytes ({self.title}), and those here have "
                f"{block_bytes:,}: it is of another model, dtype or block_size"
            )

    @property
    def title(self) -> str:
        """Description in a few words, for messages."""
        index = self.index
        named = index.identity.model if index.identity is not None else ""
        return printable(index.about or named)[:MAX_TITLE] or f"made by {printable(index.made_by)}"

    def verify(self, note: Note = lambda done, num: None) -> None:
        """Read the whole file, and verify each object. Raises ``ConfigError`` for a wrong one.

        A file that this process has verified, and that looks the same, is not read again.
        """
        with self._lock:
            if self._stamp in self._verified:
                return
        began_ns = time.time_ns()
        num = len(self.index.objects)
        sizes: dict[int, int] = {}
        for at, (path, size, digest) in enumerate(self.index.objects):
            note(at, num)
            hasher, first = blake3(), b""
            for piece in self._pieces(path):
                first = first or piece[:HEADER_BYTES]
                hasher.update(piece)
            if hasher.digest() != digest:
                raise self._refusal(f"object {at + 1} of {num} is damaged; copy the file again")
            if not self._is_object(path, size, first, sizes):
                raise self._refusal(f"object {at + 1} of {num} is not kvtier's; make it again")
        if sizes != self.index.blocks:
            raise self._refusal("it has other blocks than its index says; make it again")
        note(num, num)
        if self._changed_ns <= began_ns - GRAIN_NS:  # a later change gets another time
            with self._lock:
                self._verified.add(self._stamp)

    def _is_object(self, path: str, size: int, first: bytes, sizes: dict[int, int]) -> bool:
        """Return whether an object is a manifest, or a pack of its name. Counts its blocks."""
        if path.startswith("manifests/"):
            return size <= MAX_BYTES
        found = contents_of(first)
        if found is None or found.num_bytes != size or pack_path(found.name) != path:
            return False
        num = len(found.keys)
        sizes[found.block_bytes] = sizes.get(found.block_bytes, 0) + num
        return num * found.block_bytes <= MAX_PACK_BYTES

    def _pieces(self, path: str) -> Iterator[bytes]:
        begin, size = self._places[path]
        for at in range(0, size, PIECE_BYTES):
            yield self._bytes(begin + at, min(PIECE_BYTES, size - at))

    def _bytes(self, start: int, num_bytes: int) -> bytes:
        """Return bytes of the file. Raises ``ConfigError`` if it has become shorter."""
        into = bytearray(num_bytes)
        try:
            num_read = self._read(start, memoryview(into))
        except OSError as error:
            raise self._refusal(f"{error.strerror}; copy it again") from None
        if num_read < num_bytes:
            raise self._refusal("is truncated; copy it again")
        return bytes(into)

    def _read(self, start: int, into: memoryview) -> int:
        done = 0
        while done < len(into):
            num_bytes = os.preadv(self._fd, [into[done:]], start + done)
            if not num_bytes:
                break
            done += num_bytes
        return done

    # -- objects -----------------------------------------------------------------------------------

    def sizes(self) -> dict[str, int]:
        """Return the size of each object by its path."""
        return {path: size for path, (_, size) in self._places.items()}

    def part(self, path: str, start: int, end: int) -> memoryview | None:
        """Return a range of bytes of an object, cut at its end; None if there is no such object.

        Raises ``OSError``.
        """
        if path not in self._places:
            return None
        begin, size = self._places[path]
        into = np.empty(max(0, min(end, size) - start), np.uint8).data
        return into[: self._read(begin + start, into)]


def refuse_existing(path: Path) -> None:
    """Raise ``ConfigError`` if there is something of this name."""
    if path.exists():
        raise ConfigError(f"pack file {path}: exists already; name a new file")


def write_pack_file(
    path: Path,
    folder: Path,
    *,
    about: str = "",
    identity: KVIdentity | None = None,
    num_prompts: int = 0,
    num_tokens: int = 0,
    signer: Signer | None = None,
) -> PackFileIndex:
    """Write a pack file of all packs below a folder, one of which is in memory at a time.

    folder: of a ``dir://`` store that no process writes to.

    Raises ``ConfigError`` if the file exists, if there is no pack, or if one is damaged.
    """
    refuse_existing(path)
    new = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    objects: list[tuple[str, int, bytes]] = []
    blocks: dict[int, int] = {}
    packs: dict[tuple[int, bool], list[Pack]] = {}
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(new, flags, FILE_MODE), "wb") as file:
            file.write(BEGIN)

            def add(name: str, content: bytes) -> None:
                file.write(content)
                objects.append((name, len(content), blake3(content).digest()))

            found = (each for each in (folder / "packs").rglob("*") if each.is_file())
            for place in sorted(found, key=lambda each: each.stat().st_mtime_ns):
                name, content = str(place.relative_to(folder)), place.read_bytes()
                pack = contents_of(content)
                if pack is None or pack.num_bytes != len(content) or pack_path(pack.name) != name:
                    raise ConfigError(f"pack file {path}: {place} is damaged; export it again")
                add(name, content)
                keys = np.frombuffer(b"".join(pack.keys), "V32")
                kind = pack.block_bytes, pack.coding is not None
                packs.setdefault(kind, []).append(Pack(STAMP, keys, pack.coding))
                blocks[kind[0]] = blocks.get(kind[0], 0) + len(keys)
            if not packs:
                raise ConfigError(f"pack file {path}: there are no blocks to write into it")
            for content in _manifests(packs):
                add(manifest_path(WRITER, len(objects)), content)
            made_by = f"kvtier {__version__}"
            index = PackFileIndex(
                about, made_by, identity, num_prompts, num_tokens, blocks, objects
            )
            file.write(_end(index.to_bytes(), signer))
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except OSError as error:
        raise ConfigError(f"pack file {path}: {error.strerror}; name another file") from error
    finally:
        with suppress(OSError):
            new.unlink()
    return index


def _manifests(packs: Mapping[tuple[int, bool], Sequence[Pack]]) -> Iterator[bytes]:
    for (block_bytes, _), some in packs.items():
        for at in range(0, len(some), PACKS_PER_MANIFEST):
            yield Manifest(block_bytes, some[at : at + PACKS_PER_MANIFEST]).to_bytes()


def _end(index: bytes, signer: Signer | None) -> bytes:
    """Return an index and its trailer."""
    trailer = NAMED.pack(MAGIC, len(index), blake3(index).digest())
    if signer is None:
        trailer += bytes(PUBLIC_BYTES + SIGNATURE_BYTES)
    else:
        trailer += signer.public_key + signer.sign(CONTEXT + trailer)
    trailer += bytes(4)
    return index + trailer + checksum(trailer).to_bytes(4, "little")
