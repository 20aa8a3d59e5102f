"""System calls of the disk tier, in one place, so that tests can inject faults."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from kvtier.core.types import IoKind
from kvtier.devices.base import Memory
from kvtier.tiers.disk.io import IoEngine, open_engine

_KEEP_SIZE: Final = 1
"""FALLOC_FL_KEEP_SIZE of fallocate(2)."""
MAX_FREE_BYTES: Final = 1 << 30
"""Most bytes of a file system that a reservation leaves free for other programs."""
_CAN_NOT: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV)


class DiskSystem:
    """The real system calls. They raise ``OSError`` on failure."""

    def open_engine(
        self, fd: int, kind: IoKind, buffers: Sequence[Memory], queue_depth: int
    ) -> IoEngine:
        """Open an I/O engine for blocks in the open file ``fd``."""
        return open_engine(fd, kind, buffers, queue_depth)

    def write_at(self, fd: int, data: bytes, offset: int) -> None:
        """Write all of ``data`` (journal and superblocks; blocks go through the engine)."""
        left = memoryview(data)
        while left:
            written = os.pwrite(fd, left, offset)
            left, offset = left[written:], offset + written

    def sync(self, fd: int) -> None:
        """Wait until all written data is on the medium."""
        os.fdatasync(fd)

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Cut or extend the file."""
        os.ftruncate(fd, num_bytes)

    def reserve(self, fd: int, num_bytes: int) -> None:
        """Allocate ``num_bytes`` from the start of the file.

        Raises ENOSPC, before anything is allocated, if too little would stay free: an allocation
        that fails has taken the free space of other programs until then.
        """
        missing = num_bytes - os.fstat(fd).st_blocks * 512
        if missing > 0 and missing > spare_bytes(os.fstatvfs(fd)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, num_bytes)

    def reserve_ahead(self, fd: int, num_bytes: int) -> None:
        """Allocate space for the file to grow to ``num_bytes``; its size stays the same.

        ENOSPC if the disk is full. Does nothing on a file system without support for it.
        """
        fallocate = _fallocate()
        if os.fstat(fd).st_blocks * 512 >= num_bytes:
            return  # allocated already; a call would write the file system's own journal
        if fallocate and fallocate(fd, _KEEP_SIZE, 0, num_bytes):
            code = ctypes.get_errno()
            if code not in _CAN_NOT:
                raise OSError(code, os.strerror(code))

    def stamp(self, fd: int) -> os.stat_result:
        """Set the file's mtime to a value that no later write can produce.

        The current time would not do: clocks of file systems have a resolution of milliseconds, so
        a write right afterwards could leave the same mtime. The change is not synced: if a power
        cut reverts it, the file counts as changed.
        """
        now = time.time_ns()
        os.utime(fd, ns=(now, now - 10**9 - secrets.randbelow(10**9)))
        return os.fstat(fd)

    def replace(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target``, and sync the directory."""
        os.replace(source, target)
        fd = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def spare_bytes(found: os.statvfs_result) -> int:
    """Return the bytes of a file system that a slab may take: a hundredth of it stays free."""
    reserve = min(MAX_FREE_BYTES, found.f_blocks * found.f_frsize // 100)
    return max(0, found.f_bavail * found.f_frsize - reserve)


def read_at(fd: int, num_bytes: int, offset: int) -> bytes:
    """Read up to ``num_bytes``; fewer only at the end of the file."""
    parts: list[bytes] = []
    while num_bytes > 0 and (part := os.pread(fd, num_bytes, offset)):
        parts.append(part)
        num_bytes, offset = num_bytes - len(part), offset + len(part)
    return b"".join(parts)


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """Return fallocate(2), which Python offers only without flags; None if it is missing."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]
