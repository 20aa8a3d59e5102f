"""Opens and replaces private files safely in directories that others can write to."""

from __future__ import annotations

import errno
import logging
import os
import stat
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_KEY_FILE_BYTES = 1 << 16


def open_file(path: str | Path, flags: int, folder: int | None = None) -> int:
    """Open or create a regular file for this user only; never through a link.

    Raises ``OSError`` for anything but a regular file, without waiting for a pipe's other end.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    _must_be_regular(fd, path, "remove it")
    os.set_blocking(fd, True)  # later reads and writes may block
    return fd


def read_key_file(path: Path, is_public: bool = False) -> bytes:
    """Return the content of a file that a user names, at most ``MAX_KEY_FILE_BYTES``.

    is_public: whether every user may read it. Otherwise a warning names such a file, once.

    Raises ``OSError`` for anything but a regular file, without waiting for a pipe's other end. A
    link is followed, since Kubernetes mounts secrets as links.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    _must_be_regular(fd, path, "give a regular file")
    with os.fdopen(fd, "rb") as file:
        if not is_public and os.fstat(fd).st_mode & stat.S_IRWXO:
            _warn_of_open_file(path)
        return file.read(MAX_KEY_FILE_BYTES)


@cache
def _warn_of_open_file(path: Path) -> None:
    logger.warning("every user of this machine may open a key file path=%s; use chmod o=", path)


def _must_be_regular(fd: int, path: str | Path, advice: str) -> None:
    """Raise ``OSError``, and close the file, for anything but a regular file."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        what = f"this is no file but a directory, pipe or device; {advice}"
        raise OSError(errno.ENOTSUP, what, str(path))


def replace_file(path: Path, content: str) -> None:
    """Write a small file for this user only. Readers find it as it was, or as a whole."""
    new = path.with_name(f"{path.name}.new")
    with os.fdopen(open_file(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        file.write(content)
    new.replace(path)
