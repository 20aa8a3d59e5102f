"""Directory of a slab: its files, and the lock of its owner."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Final
from weakref import WeakSet

from kvtier.core.errors import ConfigError, printable
from kvtier.core.system.private_files import open_file
from kvtier.core.system.process import OwnerProcess

DATA: Final = "data.slab"
JOURNAL: Final = "journal"
NEW_JOURNAL: Final = "journal.new"
SUPERBLOCK: Final = "superblock"
NEW_SUPERBLOCK: Final = "superblock.new"
TRUST: Final = "trust"
LOCK: Final = "flock"
FILES: Final = (DATA, JOURNAL, NEW_JOURNAL, SUPERBLOCK, NEW_SUPERBLOCK, TRUST, LOCK)

_LOCK_TRIES: Final = 5
"""Number of attempts; ``owner_of`` holds the lock for a moment."""
_LOCK_PAUSE_S: Final = 0.02
_NO_LOCKS: Final = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems that cannot lock a directory."""


def make_folder(path: Path, owner: str = "disk tier") -> None:
    """Make the directory with access for this user only.

    An existing directory is not changed. It must belong to this user or root, and must not be
    writable by all users: KV is private, and KV that is read back is given to a model. It may be
    writable by its group, as container volumes are.

    owner: prefix of the error messages.

    Raises ``ConfigError``.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{owner}: {path} can't be created or is not a directory ({error.strerror}); "
            "choose another path"
        ) from error
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{owner}: {path} belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}; choose a directory of its own"
        )
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{owner}: every user may write to {path}; remove that permission (chmod o-w), or "
            "choose a directory below it, which is created for this user alone"
        )


def open_data(path: Path, flags: int) -> tuple[int, bool]:
    """Open the data file, with O_DIRECT if the file system supports it.

    Returns the descriptor, and whether it has O_DIRECT.
    """
    try:
        return open_file(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return open_file(path, flags), False


class OwnerLock:
    """Lock that allows one owner per slab, held until ``close`` or the end of the process.

    The directory itself is locked, because it can't be removed while it has files. The file
    ``flock`` is locked, too, and names the owner. If the file system is too
    full to create it, the directory's lock alone has to do.

    A forked child closes its copies at once, or the lock would outlive the owner.

    Raises ``ConfigError`` if another process owns the slab.
    """

    def __init__(self, folder: Path) -> None:
        self.process = OwnerProcess()
        self._fds: list[int] = []
        try:
            self._fds.append(_open_folder(folder))
            lock(self._fds[0], folder)
            with contextlib.suppress(OSError):
                self._fds.append(open_file(folder / LOCK, os.O_RDWR | os.O_CREAT))
            for fd in self._fds[1:]:
                lock(fd, folder)
                _write_name(fd)
            if not os.path.samestat(os.fstat(self._fds[0]), folder.stat()):
                raise ConfigError(f"disk tier: {folder} was replaced meanwhile; start again")
        except BaseException:
            self.close()
            raise
        _held.add(self)

    def hold(self, path: Path) -> None:
        """Lock another file of the slab as well, with a separate descriptor."""
        self._fds.append(open_file(path, os.O_RDONLY))
        lock(self._fds[-1], path.parent)

    def close(self) -> None:
        """Release the lock. In a forked child, only close the descriptors."""
        while self._fds:
            fd = self._fds.pop()
            if self.process.is_here:  # closing is not enough: a child may have a copy
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


_held: WeakSet[OwnerLock] = WeakSet()


def _release() -> None:
    for owner in list(_held):
        owner.close()


os.register_at_fork(after_in_child=_release)


def lock(fd: int, folder: Path) -> None:
    """Lock an open file for one owner of the slab in ``folder``, until it is closed.

    Raises ``ConfigError`` if another process has locked it.
    """
    for attempt in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if attempt == _LOCK_TRIES - 1:
                raise in_use(folder, _owner(folder)) from error
            time.sleep(_LOCK_PAUSE_S)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return  # e.g. a network file system: the other locks have to do


def in_use(folder: Path, owner: str) -> ConfigError:
    """Return the error for a slab of another process. owner: as ``owner_of`` describes it."""
    return ConfigError(
        f"disk tier: {folder} is in use by {owner}; stop that one, or choose another path"
    )


def owner_of(folder: Path) -> str | None:
    """Describe the process that holds the lock; None if no process does."""
    for name in (folder, folder / LOCK):
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _owner(folder)
        except OSError:
            continue
        finally:
            os.close(fd)
    return None


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _owner(folder: Path) -> str:
    """Return the lock file's description of its holder."""
    try:
        fd = open_file(folder / LOCK, os.O_RDONLY)
    except OSError:
        return "another process"
    try:
        text = os.pread(fd, 200, 0).decode("utf-8", "replace").strip()
        return printable(text) or "another process"
    finally:
        os.close(fd)


def _write_name(fd: int) -> None:
    """Overwrite the name of the last owner in place: the disk may have no free space."""
    name = f"process {os.getpid()} ({_command()})\n".encode()
    with contextlib.suppress(OSError):
        os.pwrite(fd, name, 0)
        os.ftruncate(fd, len(name))


def _command() -> str:
    try:
        return Path("/proc/self/comm").read_text().strip()
    except OSError:
        return "kvtier"
