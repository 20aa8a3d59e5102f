"""The directory of a slab: its files, and the lock that says who owns it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError, printable

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
    """Open or create a file for this user only; never through a link, and nothing but a file.

    ``OSError`` where it is something else, a pipe for instance, which is not waited for.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        what = "this is no file but a directory, pipe or device; remove it"
        raise OSError(errno.ENOTSUP, what, str(path))
    os.set_blocking(fd, True)  # an engine is to wait for blocks, in the kernel
    return fd


def open_data(path: Path, flags: int) -> tuple[int, bool]:
    """The slab's file, past the page cache where the file system can. Returns (fd, direct)."""
    try:
        return open_file(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return open_file(path, flags), False


class OwnerLock:
    """One owner per slab: held from construction to ``close``, or until the process ends."""

    def __init__(self, folder: Path) -> None:
        fd = open_file(folder / LOCK, os.O_RDWR | os.O_CREAT)
        for attempt in range(_LOCK_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if attempt == _LOCK_TRIES - 1:
                    owner = _owner(fd)
                    os.close(fd)
                    raise ConfigError(
                        f"disk tier: {folder} is in use by {owner}; "
                        "stop that one, or choose another path"
                    ) from error
                time.sleep(_LOCK_PAUSE_S)
        self._fd = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} ({_command()})\n".encode(), 0)

    def close(self) -> None:
        """Let the next owner in."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


def owner_of(folder: Path) -> str | None:
    """Who holds the lock, for people; None where nobody does."""
    try:
        fd = open_file(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(fd)
    finally:
        os.close(fd)
    return None


def _owner(fd: int) -> str:
    """What the lock's file says about who holds it."""
    text = os.pread(fd, 200, 0).decode("utf-8", "replace").strip()
    return printable(text) or "another process"


def _command() -> str:
    try:
        return Path("/proc/self/comm").read_text().strip()
    except OSError:
        return "kvtier"
