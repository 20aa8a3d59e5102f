"""The seam of I/O engines: batches of blocks between one open file and memory."""

from __future__ import annotations

import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier._hot import crc32c_many
from kvtier.devices.base import Finding
from kvtier.errors import Closed
from kvtier.system.process import OwnerProcess

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]
Uint32s = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]

IO_ALIGNMENT: Final = 4096
"""O_DIRECT: offsets, addresses and sizes are multiples of this (open(2): that of the file system;
no current one asks for more)."""
MAX_ENTRIES: Final = 256
"""Entries of one vectored call: as many pieces of memory as the kernel submits at once."""


class IoEngine(ABC):
    """Reads and writes blocks of one file.

    Block i is ``sizes[i]`` bytes at ``offsets[i]`` of the file and at ``addresses[i]`` in memory.

    What lies scattered in memory is several such blocks, neighbours in the file and in the batch.
    An engine may move those in one vectored call (see ``runs``); where that fails it moves them one
    by one, so that an error is told of the block that it is about.

    The caller guarantees
        the file stays open and the memory exists until ``close``; no block of a batch overlaps
        another where something writes; with O_DIRECT all three numbers are multiples of
        ``IO_ALIGNMENT``. At most one thread reads while one other writes; ``sync`` may be called
        by either. ``close`` comes last.
    The implementer provides
        a call returns only when the kernel uses none of its buffers any more, whatever happened. A
        short transfer is continued until all is done, the file ends or an error comes.
        ``deadline_s`` after the call began, no block is begun any more and those under way are
        cancelled where the kernel can; what it cannot cancel is waited for.
    Outcomes and errors
        per block: the number of bytes moved (below its size: the file ended there), or -errno;
        ``-ECANCELED`` where the deadline came first, and the memory or the file may then hold a
        part. A batch never raises for what the disk did; ``sync`` raises ``OSError``. After
        ``close``, and in a forked child, everything raises ``Closed``.
    """

    name: str
    _is_closed: bool
    _process: OwnerProcess

    @abstractmethod
    def read(
        self, offsets: Int64s, addresses: Uint64s, sizes: Int64s, deadline_s: float | None = None
    ) -> Int64s:
        """Read a batch; int64 [n], per block bytes or -errno. None: no deadline."""

    def read_checked(
        self,
        offsets: Int64s,
        addresses: Uint64s,
        sizes: Int64s,
        num_checked: int,
        deadline_s: float | None = None,
    ) -> tuple[Int64s, Uint32s]:
        """Read, and return crc32c of the first ``num_checked`` bytes of each block in memory.

        Or of all that the block has. Meaningful for blocks that arrived whole.
        """
        done = self.read(offsets, addresses, sizes, deadline_s)
        return done, crc32c_many(addresses, np.minimum(sizes, num_checked).astype(np.uint64))

    @abstractmethod
    def write(
        self, offsets: Int64s, addresses: Uint64s, sizes: Int64s, deadline_s: float | None = None
    ) -> Int64s:
        """Write a batch; int64 [n], per block bytes or -errno. None: no deadline."""

    @abstractmethod
    def sync(self) -> None:
        """Return when all that was written before is on the medium (fdatasync)."""

    def findings(self) -> list[Finding]:
        """For ``kvtier doctor``: what this engine uses, and why not something faster."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Give everything back but the file. A second call does nothing."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("this I/O engine was closed; open another for the file")
        self._process.must_be_here("this I/O engine")


def runs(offsets: Int64s, sizes: Int64s, fuse_bytes: int, max_bytes: int) -> Iterator[slice]:
    """The batch in parts that one call may move each, in its order.

    A part of several blocks has neighbours in the file, of 1 to ``fuse_bytes`` bytes each and
    ``max_bytes`` in all, no more than ``MAX_ENTRIES``.
    """
    ends = offsets + sizes
    is_small = (sizes > 0) & (sizes <= fuse_bytes)
    joins = np.zeros(len(sizes), bool)
    joins[1:] = (offsets[1:] == ends[:-1]) & is_small[1:] & is_small[:-1]
    first, num_bytes = 0, 0
    for at, (joined, size) in enumerate(zip(joins.tolist(), sizes.tolist(), strict=True)):
        has_room = num_bytes + size <= max_bytes and at - first < MAX_ENTRIES
        if at > first and not (joined and has_room):
            yield slice(first, at)
            first, num_bytes = at, 0
        num_bytes += size
    if len(sizes):
        yield slice(first, len(sizes))


def is_direct(fd: int) -> bool:
    """Whether the file was opened with O_DIRECT."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def check_batch(offsets: Int64s, addresses: Uint64s, sizes: Int64s, direct: bool) -> None:
    """Assert what the caller of ``read`` and ``write`` guarantees."""
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
