"""Opens and replaces private files safely in directories that others can write to."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_file(path: str | Path, flags: int, folder: int | None = None) -> int:
    """Open or create a regular file for this user only; never through a link.

    Raises ``OSError`` for anything but a regular file, without waiting for a pipe's other end.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        what = "this is no file but a directory, pipe or device; remove it"
        raise OSError(errno.ENOTSUP, what, str(path))
    os.set_blocking(fd, True)  # later reads and writes may block
    return fd


def replace_file(path: Path, content: str) -> None:
    """Write a small file for this user only. Readers find it as it was, or as a whole."""
    new = path.with_name(f"{path.name}.new")
    with os.fdopen(open_file(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        file.write(content)
    new.replace(path)
