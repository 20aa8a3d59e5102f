"""Opens files that hold private data, in directories where others may have put something."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_file(path: str | Path, flags: int, folder: int | None = None) -> int:
    """Open or create a file for this user only; never through a link, and nothing but a file.

    ``OSError`` where it is something else, a pipe for instance, which is not waited for.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        what = "this is no file but a directory, pipe or device; remove it"
        raise OSError(errno.ENOTSUP, what, str(path))
    os.set_blocking(fd, True)  # who uses it is to wait for blocks, in the kernel
    return fd
