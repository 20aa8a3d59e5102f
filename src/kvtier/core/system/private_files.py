"""Opens and replaces private files safely in directories that others can write to."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from functools import cache
from pathlib import Path

from blake3 import blake3

logger = logging.getLogger(__name__)

MAX_KEY_FILE_BYTES = 1 << 16
MAX_CHECKED_BYTES = 16 << 20
"""Longest file that ``read_checked_file`` reads."""


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
    with os.fdopen(
        open_file(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8"
    ) as file:
        file.write(content)
    new.replace(path)


def replace_checked_file(path: Path, content: str) -> None:
    """Write a small file as ``replace_file`` does, for ``read_checked_file``."""
    replace_file(path, f"{_check(content.encode())}\n{content}")


def read_checked_file(path: Path) -> str:
    """Return the content that ``replace_checked_file`` has written.

    Raises ``OSError`` if it can't be read, and ``ValueError`` if a byte of it has changed.
    """
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        check, _, content = file.read(MAX_CHECKED_BYTES).partition(b"\n")
    if check != _check(content).encode():
        raise ValueError(f"{path.name} is damaged, or of another version")
    return content.decode()


def _check(content: bytes) -> str:
    return blake3(content).hexdigest()


def remove(path: Path) -> None:
    """Remove whatever has this name: a file, a link, a directory with all that is in it, or none.

    Links are not followed. Raises ``OSError``.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
