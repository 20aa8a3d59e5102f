"""Small copies by a kernel: the GPU itself reads and writes page-locked host memory.

Below some 64 KiB the fixed cost of a copy exceeds that of its bytes on a GPU's copy engine. The
kernel (``copy_fragments.cu``) runs on a few multiprocessors, so that the others can compute. Needs
host memory that the GPU sees at the host's address.
"""

from __future__ import annotations

import logging
import mmap
from contextlib import suppress
from ctypes import addressof, c_uint, c_uint64, c_void_p
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

from kvtier.devices.compute import Handle
from kvtier.devices.copies import Copies
from kvtier.devices.library import DriverError

if TYPE_CHECKING:
    from kvtier.devices.cuda import CudaDriver

logger = logging.getLogger(__name__)

NAME = "copy_fragments"
NUM_BLOCKS = 4
"""Multiprocessors that keep the bus busy: each runs one block of threads."""
THREADS, WARP = 1024, 32
"""Threads of a block, and of a warp, which does one copy at a time."""
ALIGNMENT = 16
"""Alignment of addresses and sizes, in bytes: what a thread moves at once."""
TABLE_COPIES = 4096
"""Maximum number of copies of a launch."""


class CopyTable:
    """Page-locked memory with the addresses and sizes of one launch's copies.

    It must not change before the launch is done.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 3 * TABLE_COPIES * 8)
        self._rows = np.frombuffer(self._memory, np.uint64).reshape(3, TABLE_COPIES)
        self.address = self._rows.ctypes.data
        self.nbytes = len(self._memory)
        self._values = [c_uint64(row.ctypes.data) for row in self._rows]
        self._count = c_uint()
        pointers = [addressof(each) for each in (*self._values, self._count)]
        self.arguments = (c_void_p * len(pointers))(*pointers)
        """Pointers to the kernel's arguments."""

    def fill(self, copies: Copies) -> None:
        """Write at most ``TABLE_COPIES`` copies."""
        for row, column in zip(self._rows, (copies.dst, copies.src, copies.size), strict=True):
            row[: len(copies)] = column
        self._count.value = len(copies)


class _Lent:
    """A table in use; deleting this returns it to ``free``."""

    def __init__(self, table: CopyTable, free: list[CopyTable]) -> None:
        self._table, self._free = table, free

    def __del__(self) -> None:
        self._free.append(self._table)


class CopyKernel:
    """Copies on one GPU. Raises ``DriverError`` if the driver does not load the kernel."""

    def __init__(self, driver: CudaDriver) -> None:
        image = files("kvtier.devices").joinpath(f"{NAME}.ptx").read_bytes()
        self._driver = driver
        self._kernel = driver.load_kernel(image, NAME)
        self._tables: list[CopyTable] = []
        self._free: list[CopyTable] = []

    def takes(self, copies: Copies) -> bool:
        """Whether all addresses and sizes are aligned."""
        bits = np.bitwise_or.reduce(copies.dst | copies.src | copies.size)
        return not int(bits) % ALIGNMENT

    def copy(self, copies: Copies, stream: Handle) -> list[object]:
        """Queue the copies on ``stream``. Return objects that must stay alive until done."""
        alive: list[object] = []
        for piece in copies.pieces(TABLE_COPIES):
            table = self._take_table()
            alive.append(_Lent(table, self._free))
            table.fill(piece)
            num_blocks = min(NUM_BLOCKS, -(-len(piece) * WARP // THREADS))
            self._driver.launch(self._kernel, num_blocks, THREADS, stream, table.arguments)
        return alive

    def _take_table(self) -> CopyTable:
        with suppress(IndexError):  # the threads of both directions take tables
            return self._free.pop()
        table = CopyTable()
        self._driver.lock(table.address, table.nbytes)
        self._tables.append(table)
        return table

    def close(self) -> None:
        """Release the tables; nothing may be in flight."""
        for table in self._tables:
            try:
                self._driver.unlock(table.address)
            except DriverError as error:  # a lost device must not prevent shutdown
                logger.info("table not unlocked error=%s", error)
        self._tables.clear()
        self._free.clear()
