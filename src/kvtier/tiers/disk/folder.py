"""The directory of a slab: its files, and the lock that says who owns it."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Final
from weakref import WeakSet

from kvtier.errors import ConfigError
from kvtier.process import OwnerProcess

DATA: Final = "data.slab"
JOURNAL: Final = "journal"
NEW_JOURNAL: Final = "journal.new"
SUPERBLOCK: Final = "superblock"
NEW_SUPERBLOCK: Final = "superblock.new"
LOCK: Final = "flock"
FILES: Final = (DATA, JOURNAL, NEW_JOURNAL, SUPERBLOCK, NEW_SUPERBLOCK, LOCK)

_LOCK_TRIES: Final = 5
"""Someone who only looks holds the lock for a moment."""
_LOCK_PAUSE_S: Final = 0.02


def make_folder(path: Path) -> None:
    """Make the directory, for this user only. One that is there stays as it is."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"disk tier: {path} can't be made or is no directory ({error.strerror}); "
            "choose another path"
        ) from error


def open_file(path: Path, flags: int) -> int:
    """Open or create a file for this user only; never through a link."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def open_data(path: Path, flags: int) -> tuple[int, bool]:
    """The slab's file, past the page cache where the file system can. Returns (fd, direct)."""
    try:
        return open_file(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return open_file(path, flags), False


class OwnerLock:
    """One owner per slab: held from construction to ``close``, or until the process ends.

    A forked child is no owner: it lets go of its copy at once, or the lock would outlive the owner.
    """

    def __init__(self, folder: Path) -> None:
        self.process = OwnerProcess()
        fd = open_file(folder / LOCK, os.O_RDWR | os.O_CREAT)
        for attempt in range(_LOCK_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if attempt == _LOCK_TRIES - 1:
                    owner = os.pread(fd, 200, 0).decode("utf-8", "replace").strip()
                    os.close(fd)
                    raise ConfigError(
                        f"disk tier: {folder} is in use by {owner or 'another process'}; "
                        "stop that one, or choose another path"
                    ) from error
                time.sleep(_LOCK_PAUSE_S)
        self._fd = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} ({_command()})\n".encode(), 0)
        _held.add(self)

    def close(self) -> None:
        """Let the next owner in. In a forked child it stays with its owner."""
        if self._fd < 0:
            return
        if self.process.is_here:
            os.ftruncate(self._fd, 0)
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing would not do: a child may have a copy
        os.close(self._fd)
        self._fd = -1


_held: WeakSet[OwnerLock] = WeakSet()


def _let_go() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go)


def owner_of(folder: Path) -> str | None:
    """Who holds the lock, for people; None where nobody does."""
    try:
        fd = open_file(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 200, 0).decode("utf-8", "replace").strip() or "another process"
    finally:
        os.close(fd)
    return None


def _command() -> str:
    try:
        return Path("/proc/self/comm").read_text().strip()
    except OSError:
        return "kvtier"
