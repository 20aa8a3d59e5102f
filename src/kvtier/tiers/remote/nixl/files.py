"""Each block as a file that a NIXL plug-in reads and writes.

A file is written under a temporary name and renamed, so it is always complete under its own.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

from kvtier.core.system.private_files import open_file
from kvtier.core.types import BlockKey
from kvtier.tiers.disk.bounce import ALIGNMENT
from kvtier.tiers.disk.format.folder import make_folder
from kvtier.tiers.remote.bounce_workers import (
    Addresses,
    Arrived,
    BounceClient,
    BounceRows,
    IsWanted,
)
from kvtier.tiers.remote.errors import Unreachable
from kvtier.tiers.remote.nixl.agent import READ, WRITE, Agent, Part
from kvtier.tiers.remote.nixl.contract import check_contract
from kvtier.tiers.storage import Outcome

FOLDER_MODE: Final = 0o700
FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
NO_FILE: Final = (errno.ELOOP, errno.ENOTSUP, errno.ENXIO)
"""Errors for a link, a pipe, a device or a socket in place of a file."""
UNFINISHED: Final = ".part"
"""Suffix of unfinished files, which no reader opens."""
MAX_PARTS: Final = 64
"""Parts of a transfer. NIXL submits this many to the kernel at once, so none is begun later."""
MAX_FAILURES: Final = 3
"""Consecutive failures after which the remaining parts are not tried."""

THERE, ABSENT, DAMAGED, FAILED = Outcome


@lru_cache
def can_go_direct(folder: Path) -> bool:
    """Whether files in ``folder`` can bypass the page cache (``O_DIRECT``)."""
    path = folder / _unfinished("direct")
    try:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_DIRECT", 0)
        os.close(open_file(path, flags))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return hasattr(os, "O_DIRECT")


def _unfinished(name: str) -> str:
    return f"{name}.{os.urandom(8).hex()}{UNFINISHED}"


class FilesClient(BounceClient):
    """Files in 256 folders below a folder, named by their keys in hex.

    File sizes are multiples of the page size; bytes after a value are ignored.
    """

    def __init__(
        self, plugin: str, params: dict[str, str], folder: Path, direct: bool, rows: BounceRows
    ) -> None:
        self._new_agent = partial(Agent, plugin, params)
        self._folder = folder
        self._rows = rows
        self._most_bytes = rows.slot_bytes
        try:
            folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            make_folder(folder, "nixl")  # and check its owner
            is_direct = direct and can_go_direct(folder)
        except OSError as error:
            raise Unreachable(f"{folder}: {error.strerror}") from error
        self._flags = os.O_DIRECT if is_direct else 0
        self._agent = self._new_agent(rows)

    def test(self) -> str:
        path = self._folder / _unfinished("self-test")
        try:
            descriptor = open_file(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | self._flags)
        except OSError as error:
            raise Unreachable(f"{path.parent}: {error.strerror}") from error
        try:
            return f"by {check_contract(self._new_agent, descriptor)}"
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)

    @contextmanager
    def _folder_of(self, name: str, create: bool = False) -> Iterator[int]:
        """Open the folder of a file: not a link, and owned by this user or root.

        Raises:
            OSError: the folder does not exist or has another owner.
        """
        path = f"{self._folder}/{name[:2]}"  # building a Path would take longer than the call
        try:
            descriptor = os.open(path, FOLDER)
        except FileNotFoundError:
            if not create:
                raise
            with suppress(FileExistsError):
                os.mkdir(path, FOLDER_MODE)
            descriptor = os.open(path, FOLDER)
        try:
            if os.fstat(descriptor).st_uid not in (0, os.geteuid()):
                raise PermissionError(errno.EACCES, "another user's folder", path)
            yield descriptor
        finally:
            os.close(descriptor)

    def find(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return [self._look(key) for key in keys]

    def _look(self, key: BlockKey) -> Outcome:
        """Look up one key. A file that can't be a value counts as absent: it will be replaced."""
        try:
            with self._folder_of(name := key.hex()) as folder:
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            return THERE if self._is_block(found) else ABSENT
        except FileNotFoundError:
            return ABSENT
        except OSError:
            return FAILED

    def _is_block(self, found: os.stat_result) -> bool:
        """Whether it may be a block's file.

        It must be a regular file of whole pages, owned by this user or root.
        """
        return (
            stat.S_ISREG(found.st_mode)
            and found.st_uid in (0, os.geteuid())
            and 0 < found.st_size <= self._most_bytes
            and found.st_size % ALIGNMENT == 0
        )

    def read(self, keys: Sequence[BlockKey], begins: Addresses) -> list[Arrived]:
        outcomes: list[Arrived] = [FAILED] * len(keys)
        parts: dict[int, Part] = {}
        with _descriptors() as opened:
            for at, key in enumerate(keys):
                try:
                    with self._folder_of(name := key.hex()) as folder:
                        descriptor = open_file(name, os.O_RDONLY | self._flags, folder)
                    opened.append(descriptor)
                    if self._is_block(found := os.fstat(descriptor)):
                        parts[at] = (int(begins[at]), found.st_size, descriptor)
                    else:
                        outcomes[at] = DAMAGED
                except FileNotFoundError:
                    outcomes[at] = ABSENT
                except OSError as error:
                    outcomes[at] = DAMAGED if error.errno in NO_FILE else FAILED
            for at, has_moved in zip(parts, self._move(READ, [*parts.values()]), strict=True):
                outcomes[at] = parts[at][1] if has_moved else FAILED
        return outcomes

    def write(
        self,
        keys: Sequence[BlockKey],
        begins: Addresses,
        sizes: Sequence[int],
        is_wanted: IsWanted,
    ) -> list[Outcome]:
        outcomes: list[Outcome] = [FAILED] * len(keys)
        parts: dict[int, Part] = {}
        written: dict[int, str] = {}
        with _descriptors() as opened:
            for at, key in enumerate(keys):
                written[at] = _unfinished(key.hex())
                with suppress(OSError):
                    opened.append(self._create(written[at]))
                    num_bytes = -(-sizes[at] // ALIGNMENT) * ALIGNMENT
                    parts[at] = (int(begins[at]), num_bytes, opened[-1])
            for at, has_moved in zip(parts, self._move(WRITE, [*parts.values()]), strict=True):
                _, num_bytes, descriptor = parts[at]
                with suppress(OSError):
                    is_whole = has_moved and os.fstat(descriptor).st_size == num_bytes
                    if is_whole and is_wanted():
                        self._rename(written[at], keys[at].hex())
                        outcomes[at] = THERE
        for at in parts:
            if outcomes[at] is FAILED:
                with suppress(OSError):
                    self._unlink(written[at])
        return outcomes

    def _create(self, name: str) -> int:
        with self._folder_of(name, create=True) as folder:
            return open_file(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | self._flags, folder)

    def _rename(self, name: str, new_name: str) -> None:
        with self._folder_of(name) as folder:
            os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=folder)

    def _unlink(self, name: str) -> None:
        with self._folder_of(name) as folder:
            os.unlink(name, dir_fd=folder)

    def _move(self, operation: str, parts: list[Part]) -> list[bool]:
        begins = range(0, len(parts), MAX_PARTS)
        moved = (self._move_some(operation, parts[at : at + MAX_PARTS]) for at in begins)
        return [has_moved for some in moved for has_moved in some]

    def _move_some(self, operation: str, parts: list[Part]) -> list[bool]:
        """Move all parts in one transfer.

        A transfer has one status for all its parts. If it fails, they are moved one by one, by a
        new agent that has nothing in flight.
        """
        if self._agent.move(operation, [parts]) == [True]:
            return [True] * len(parts)
        moved: list[bool] = []
        while len(moved) < len(parts) and moved[-MAX_FAILURES:] != [False] * MAX_FAILURES:
            if not moved or not moved[-1]:
                self._agent.close()
                self._agent = self._new_agent(self._rows)
            moved += self._agent.move(operation, [[parts[len(moved)]]])
        return moved + [False] * (len(parts) - len(moved))

    def remove(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            with suppress(FileNotFoundError):
                self._unlink(key.hex())

    def close(self) -> None:
        self._agent.close()


@contextmanager
def _descriptors() -> Iterator[list[int]]:
    """Yield a list of descriptors, which are closed at the end."""
    opened: list[int] = []
    try:
        yield opened
    finally:
        for descriptor in opened:
            os.close(descriptor)
