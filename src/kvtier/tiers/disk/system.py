"""What the disk tier asks of the operating system, in one place: tests put faults there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvtier.devices.base import Memory
from kvtier.tiers.disk.io import IoEngine, open_engine
from kvtier.types import IoKind


class DiskSystem:
    """The real system calls. Everything raises ``OSError`` where the system refuses."""

    def open_engine(
        self, fd: int, kind: IoKind, buffers: Sequence[Memory], queue_depth: int
    ) -> IoEngine:
        """An engine for blocks in the open file ``fd``."""
        return open_engine(fd, kind, buffers, queue_depth)

    def write_at(self, fd: int, data: bytes, offset: int) -> None:
        """Write all of ``data`` (journal and superblocks; blocks go through the engine)."""
        left = memoryview(data)
        while left:
            written = os.pwrite(fd, left, offset)
            left, offset = left[written:], offset + written

    def sync(self, fd: int) -> None:
        """Return when what was written is on the medium."""
        os.fdatasync(fd)

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Cut or extend the file."""
        os.ftruncate(fd, num_bytes)

    def reserve(self, fd: int, num_bytes: int) -> None:
        """Have room for ``num_bytes`` from the start of the file; ENOSPC where there is none."""
        os.posix_fallocate(fd, 0, num_bytes)

    def replace(self, source: Path, target: Path) -> None:
        """Rename over ``target``, and have the directory on the medium."""
        os.replace(source, target)
        fd = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def read_at(fd: int, num_bytes: int, offset: int) -> bytes:
    """Up to ``num_bytes``; fewer only at the end of the file."""
    parts: list[bytes] = []
    while num_bytes > 0 and (part := os.pread(fd, num_bytes, offset)):
        parts.append(part)
        num_bytes, offset = num_bytes - len(part), offset + len(part)
    return b"".join(parts)
