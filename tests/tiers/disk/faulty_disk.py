"""A disk system with planned faults: errors, short transfers, flipped bytes, waits."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from threading import Event, Lock

import numpy as np

from kvtier.devices.base import Memory
from kvtier.tiers.disk import DiskSystem, IoKind
from kvtier.tiers.disk.arrays import Int64s, Uint64s
from kvtier.tiers.disk.io import IoEngine
from tests.tiers.disk.wrapped_engine import SECTOR_BYTES, WrappedEngine, open_plain


class FaultyDisk(DiskSystem):
    """Disk system whose operations fail or wait as a test plans.

    Operations are "read" and "write" (one block each), "journal" (a write to the journal or a
    superblock) and "sync" (any sync). They are counted over all files that this system opened.

    Reads and writes wait while they are held or stalled, so that tests need no sleep.

    ``deadlines`` lists the (operation, deadline) of each batch that the engine got.
    """

    OPERATIONS = ("read", "write", "journal", "sync")

    def __init__(self) -> None:
        self.num_done = dict.fromkeys(self.OPERATIONS, 0)
        self._faults: dict[tuple[str, int], int] = {}
        self.deadlines: list[tuple[str, float | None]] = []
        self._gates = {operation: Event() for operation in self.OPERATIONS}
        self._stalls = {operation: _Stall() for operation in self.OPERATIONS}
        self.release(*self.OPERATIONS)

    # planned faults

    def fail(self, operation: str, nth: int = 1, code: int = errno.EIO, count: int = 1) -> None:
        """The ``nth`` operation from now, and ``count`` - 1 after it, fail with ``code``."""
        for number in range(nth, nth + count):
            self._plan(operation, number, -code)

    def cut_short(self, operation: str, nth: int = 1, num_bytes: int = SECTOR_BYTES) -> None:
        """The ``nth`` read or write from now moves only ``num_bytes``, and reports that number."""
        self._plan(operation, nth, num_bytes)

    def flip(self, operation: str, nth: int = 1) -> None:
        """The ``nth`` read or write from now has a wrong byte, and reports success."""
        self._plan(operation, nth, -_FLIP)

    def hold(self, *operations: str) -> None:
        """Hold these operations until ``release``."""
        for operation in operations:
            self._gates[operation].clear()

    def release(self, *operations: str) -> None:
        """Release these operations."""
        for operation in operations:
            self._gates[operation].set()
            self._stalls[operation].end()

    def stall(self, *operations: str, after: int = 0) -> None:
        """Finish ``after`` more reads or writes, and hold all later ones until ``release``.

        An operation with a deadline is cancelled at its deadline.
        """
        for operation in operations:
            self._stalls[operation].begin(after)

    def forget_faults(self) -> None:
        """Cancel the faults that have not happened yet."""
        self._faults.clear()

    def _plan(self, operation: str, nth: int, fault: int) -> None:
        self._faults[operation, self.num_done[operation] + nth] = fault

    # the system

    def next_fault(self, operation: str) -> int | None:
        """Count one operation; return its fault, if there is one."""
        self.num_done[operation] += 1
        return self._faults.pop((operation, self.num_done[operation]), None)

    def wait(self, operation: str) -> None:
        """Return when the operation is not held."""
        self._gates[operation].wait()

    def num_moved(self, operation: str, num: int, deadline_s: float | None) -> int:
        """Return how many of ``num`` reads or writes are done before ``deadline_s``."""
        self.deadlines.append((operation, deadline_s))
        return self._stalls[operation].pass_through(num, deadline_s)

    def open_engine(
        self, fd: int, kind: IoKind, buffers: Sequence[Memory], queue_depth: int
    ) -> IoEngine:
        return _FaultyEngine(super().open_engine(fd, kind, buffers, queue_depth), fd, self)

    def write_at(self, fd: int, data: bytes, offset: int) -> None:
        self.wait("journal")
        fault = self.next_fault("journal")
        if fault is not None:
            # Some of it is there: an append that failed has to be taken back.
            super().write_at(fd, data[: len(data) // 2], offset)
            _raise(fault)
        super().write_at(fd, data, offset)

    def sync(self, fd: int) -> None:
        self.wait("sync")
        fault = self.next_fault("sync")
        if fault is not None:
            _raise(fault)
        super().sync(fd)


class _Stall:
    """Lets a number of operations through, and no more until it ends."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._over = Event()
        self._num_left = 0
        self._over.set()

    def begin(self, num: int) -> None:
        with self._lock:
            self._num_left = num
            self._over.clear()

    def end(self) -> None:
        self._over.set()

    def pass_through(self, num: int, timeout_s: float | None) -> int:
        """Wait until ``num`` have passed, or for ``timeout_s``; return how many have."""
        with self._lock:
            if self._over.is_set():
                return num
            num_now = min(num, self._num_left)
            self._num_left -= num_now
        return num if num_now == num or self._over.wait(timeout_s) else num_now


_FLIP = 1 << 20
"""Stands for a flipped byte where a fault gives -errno."""


class _FaultyEngine(WrappedEngine):
    def __init__(self, inner: IoEngine, fd: int, system: FaultyDisk) -> None:
        super().__init__(inner, fd)
        self._system = system

    def _transfer(
        self,
        write: bool,
        offsets: Int64s,
        addresses: Uint64s,
        sizes: Int64s,
        deadline_s: float | None,
    ) -> Int64s:
        operation = "write" if write else "read"
        self._system.wait(operation)
        num = self._system.num_moved(operation, len(offsets), deadline_s)
        done = np.full(len(offsets), -errno.ECANCELED, np.int64)
        done[:num] = super()._transfer(
            write, offsets[:num], addresses[:num], sizes[:num], deadline_s
        )
        for at in range(num):
            result = self._system.next_fault(operation)
            if result is None:
                continue
            offset, address = int(offsets[at]), int(addresses[at])
            is_flip, moved = result == -_FLIP, max(result, 0)
            num_bad = 1 if is_flip else int(sizes[at]) - moved
            if write:
                _spoil(self.fd, offset + moved, num_bad)
            elif is_flip:
                ctypes.c_uint8.from_address(address).value ^= 0x10
            else:  # what did not arrive leaves garbage
                ctypes.memset(address + moved, 0xEE, num_bad)
            if not is_flip:
                done[at] = result
        return done

    def sync(self) -> None:
        self._system.wait("sync")
        fault = self._system.next_fault("sync")
        if fault is not None:
            _raise(fault)
        self.inner.sync()


def _raise(result: int) -> None:
    raise OSError(-result, os.strerror(-result))


def _spoil(fd: int, offset: int, num_bytes: int) -> None:
    """Invert bytes of an open file."""
    with open_plain(fd) as file:
        file.seek(offset)
        content = np.frombuffer(file.read(num_bytes), np.uint8)
        file.seek(offset)
        file.write((~content).tobytes())
