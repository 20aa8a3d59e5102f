"""Copies through a buffer in the accelerator's memory: long ones over the bus, short ones within.

A copy engine is fast with long copies only, and a kernel that copies over the bus takes
multiprocessors from compute for as long as the bus takes. Here the copy engine moves what lies
together in host memory, a block's layers for instance, in one copy. The kernel moves the pieces
between the buffer and their places; within the accelerator's memory that takes microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvtier.devices.base import Direction
from kvtier.devices.compute import Handle
from kvtier.devices.copies import Copies
from kvtier.devices.driver import Driver
from kvtier.devices.kernel import CopyKernel

HALF_BYTES = 16 << 20
"""Bytes of half a buffer: while one half crosses the bus, the kernel works on the other."""
WORTH = 2
"""Copies over the bus have to be fewer at least by this factor."""


class Staging:
    """Buffer and second stream for the copies of one queue."""

    def __init__(self, driver: Driver, kernel: CopyKernel) -> None:
        self._driver, self._kernel = driver, kernel
        self._buffer = driver.allocate(2 * HALF_BYTES)
        self._stream = driver.new_stream()
        self._turn = 0
        self._free_after: list[Handle | None] = [None, None]
        """Per half, the event after which it may be written again."""

    def copy(self, copies: Copies, direction: Direction, stream: Handle) -> list[object] | None:
        """Queue the copies on ``stream``. Return objects that must stay alive until done.

        None if too few are adjacent in host memory, or one is too large.
        """
        copies = copies.sorted_by(direction)
        runs = copies.num_runs(direction)
        if runs * WORTH > len(copies) or int(copies.size.max()) > HALF_BYTES:
            return None
        alive: list[object] = []
        wide = self._kernel.num_multiprocessors
        for piece in _pieces(copies):
            half = self._buffer + self._turn * HALF_BYTES
            long, short = piece.through(half, direction)
            if direction is Direction.LOAD:
                self._after(stream, self._free_after[self._turn])
                alive += self._over_the_bus(long, direction, stream)
                self._order(stream, self._stream)
                alive += self._kernel.copy(short, self._stream, wide)
                self._keep(self._driver.record(self._stream))
            else:
                self._order(stream, self._stream)
                self._after(self._stream, self._free_after[self._turn])
                alive += self._kernel.copy(short, self._stream, wide)
                self._order(self._stream, stream)
                alive += self._over_the_bus(long, direction, stream)
                self._keep(self._driver.record(stream))
            self._turn = 1 - self._turn
        if direction is Direction.LOAD:
            self._order(self._stream, stream)
        return alive

    def _over_the_bus(self, copies: Copies, direction: Direction, stream: Handle) -> list[Copies]:
        pieces = copies.pieces(self._driver.max_copies)
        for piece in pieces:
            self._driver.copy_batch(piece, direction, stream)
        return pieces

    def _keep(self, event: Handle) -> None:
        """Note that the half in turn is in use until ``event``."""
        before = self._free_after[self._turn]
        self._free_after[self._turn] = event
        if before is not None:
            self._driver.forget(before)

    def _after(self, stream: Handle, event: Handle | None) -> None:
        if event is not None:
            self._driver.hold_stream(stream, event)

    def _order(self, first: Handle, then: Handle) -> None:
        """Make what is queued on ``then`` from now on start after what is queued on ``first``."""
        event = self._driver.record(first)
        self._driver.hold_stream(then, event)
        self._driver.forget(event)

    def close(self) -> None:
        """Free buffer and stream; nothing may be in flight."""
        for event in self._free_after:
            if event is not None:
                self._driver.forget(event)
        self._driver.free_stream(self._stream)
        self._driver.free(self._buffer)


def _pieces(copies: Copies) -> Iterator[Copies]:
    """Yield the copies in pieces of at most ``HALF_BYTES``."""
    end = np.cumsum(copies.size)
    start, done = 0, np.uint64(0)
    while start < len(copies):
        stop = int(np.searchsorted(end, done + np.uint64(HALF_BYTES), "right"))
        yield copies[start:stop]
        start, done = stop, end[stop - 1]
