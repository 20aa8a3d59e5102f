"""Interface of I/O engines: batches of transfers between one open file and memory."""

from __future__ import annotations

import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

import numpy as np

from kvtier.core.errors import Closed
from kvtier.core.hot import crc32c_many
from kvtier.core.system.process import OwnerProcess
from kvtier.devices.base import Finding
from kvtier.tiers.disk.arrays import Int64s, Uint32s, Uint64s

IO_ALIGNMENT: Final = 4096
"""With O_DIRECT, offsets, addresses and sizes are multiples of this. No current file system
requires more (open(2))."""
MAX_ENTRIES: Final = 256
"""Maximum entries of one vectored call: as many pieces of memory as the kernel submits at once."""


class IoEngine(ABC):
    """Reads and writes blocks of one file.

    Block i has ``sizes[i]`` bytes at ``offsets[i]`` of the file and at ``addresses[i]`` in memory.

    Data that is scattered in memory is passed as several blocks, neighbours in the file and in the
    batch. An engine may move those in one vectored call (see ``runs``). If that call fails, it
    moves them one by one, so that the error is reported for the right block.

    The caller guarantees
        the file stays open and the memory exists until ``close``. No block of a batch overlaps
        another one that is written to. With O_DIRECT all three numbers are multiples of
        ``IO_ALIGNMENT``. At most one thread reads while one other writes; either may call
        ``sync``. ``close`` is the last call.
    The implementer provides
        a call returns only when the kernel no longer uses any of its buffers. A short transfer is
        continued until it is complete, the file ends, or an error occurs. ``deadline_s`` after the
        start of the call no further block begins, and blocks in flight are cancelled. If the kernel
        can't cancel them, the call waits for them.
    Outcomes and errors
        per block: the number of bytes moved (if below its size, the file ended there), or -errno.
        ``-ECANCELED``: the deadline came first; the memory or the file may then hold a part. A
        batch never raises for errors of the disk; ``sync`` raises ``OSError``. After ``close``, and
        in a forked child, everything raises ``Closed``.
    """

    name: str

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._direct = is_direct(fd)
        self._is_closed = False
        self._process = OwnerProcess()

    def read(
        self, offsets: Int64s, addresses: Uint64s, sizes: Int64s, deadline_s: float | None = None
    ) -> Int64s:
        """Read a batch; return bytes or -errno per block: int64 [n].

        Args:
            offsets: int64 [n], offset of each block in the file.
            addresses: uint64 [n], address of each block in memory.
            sizes: int64 [n], bytes of each block.
            deadline_s: time limit in seconds; None for no limit.
        """
        return self._transfer(False, offsets, addresses, sizes, deadline_s)

    def read_checked(
        self,
        offsets: Int64s,
        addresses: Uint64s,
        sizes: Int64s,
        num_checked: int,
        deadline_s: float | None = None,
    ) -> tuple[Int64s, Uint32s]:
        """Read a batch, and compute the crc32c of the first ``num_checked`` bytes of each block.

        A block with fewer bytes is checked as a whole. Checksums are valid only for blocks that
        arrived completely. For the other parameters see ``read``.
        """
        done = self.read(offsets, addresses, sizes, deadline_s)
        return done, crc32c_many(addresses, np.minimum(sizes, num_checked).astype(np.uint64))

    def write(
        self, offsets: Int64s, addresses: Uint64s, sizes: Int64s, deadline_s: float | None = None
    ) -> Int64s:
        """Write a batch; return bytes or -errno per block: int64 [n]. Parameters as in ``read``."""
        return self._transfer(True, offsets, addresses, sizes, deadline_s)

    @abstractmethod
    def _transfer(
        self,
        write: bool,
        offsets: Int64s,
        addresses: Uint64s,
        sizes: Int64s,
        deadline_s: float | None,
    ) -> Int64s:
        """Read or write a batch; see ``read``."""

    def sync(self) -> None:
        """Wait until all earlier writes are on the medium (fdatasync)."""
        self._check_open()
        os.fdatasync(self._fd)

    def findings(self) -> list[Finding]:
        """Return findings for ``kvtier doctor``: the engine, and why it is not a faster one."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Release everything except the file. A second call does nothing."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("this I/O engine was closed; open another for the file")
        self._process.must_be_here("this I/O engine")


def runs(
    offsets: Int64s,
    sizes: Int64s,
    fuse_bytes: int,
    max_bytes: int,
    max_entries: int = MAX_ENTRIES,
) -> Iterator[slice]:
    """Yield the parts of a batch, in order, each of which one call may move.

    A part is a single block, or several small blocks that are neighbours in the file.

    Args:
        offsets: int64 [n], offset of each block in the file.
        sizes: int64 [n], bytes of each block.
        fuse_bytes: maximum bytes of a block that is joined with others.
        max_bytes: maximum bytes of a part of several blocks.
        max_entries: maximum blocks of a part.
    """
    ends = offsets + sizes
    is_small = (sizes > 0) & (sizes <= fuse_bytes)
    joins = np.zeros(len(sizes), bool)
    joins[1:] = (offsets[1:] == ends[:-1]) & is_small[1:] & is_small[:-1]
    first, num_bytes = 0, 0
    for at, (joined, size) in enumerate(zip(joins.tolist(), sizes.tolist(), strict=True)):
        has_room = num_bytes + size <= max_bytes and at - first < max_entries
        if at > first and not (joined and has_room):
            yield slice(first, at)
            first, num_bytes = at, 0
        num_bytes += size
    if len(sizes):
        yield slice(first, len(sizes))


def is_direct(fd: int) -> bool:
    """Return whether the file was opened with O_DIRECT."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def check_batch(offsets: Int64s, addresses: Uint64s, sizes: Int64s, direct: bool) -> None:
    """Assert the guarantees of the callers of ``read`` and ``write``."""
    assert len(offsets) == len(addresses) == len(sizes), (
        f"a batch has as many offsets as addresses and sizes, "
        f"not {len(offsets)}, {len(addresses)} and {len(sizes)}"
    )
    if not len(offsets):
        return
    assert offsets.min() >= 0, f"offset {offsets.min()} is below 0"
    assert sizes.min() >= 0, f"size {sizes.min()} is below 0"
    if direct:
        for name, numbers in (("offset", offsets), ("address", addresses), ("size", sizes)):
            odd = numbers % numbers.dtype.type(IO_ALIGNMENT) != 0
            assert not odd.any(), (
                f"O_DIRECT moves multiples of {IO_ALIGNMENT} bytes: "
                f"{name} {numbers[odd][0]} of block {odd.argmax()} is none"
            )
