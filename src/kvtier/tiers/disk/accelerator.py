"""Transfers of blocks from a slab into an accelerator's memory."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from kvtier.devices.base import CopyBatch, Direction, Memory
from kvtier.devices.copies import Copies
from kvtier.tiers.disk.arrays import Bools, Int64s, Uint64s
from kvtier.tiers.disk.health import DiskHealth
from kvtier.tiers.disk.io import open_direct
from kvtier.tiers.disk.io.direct import DirectEngine
from kvtier.tiers.pieces import Pieces

if TYPE_CHECKING:
    from kvtier.tiers.disk.direct import Pool


class Accelerator:
    """Path of blocks into an accelerator's memory.

    After a successful ``open``, the vendor's file library reads blocks directly. Otherwise the
    device copies them from a bounce buffer. In both cases the bytes have arrived when a call
    returns.

    Args:
        pool: the engine's KV pool, in memory of a device.
        buffer: bounce buffer in host memory; it is page-locked here.
        health: health of direct reads.

    The caller guarantees
        one thread reads. The device's compute on the target memory is done: transfers are not
        ordered against it. ``buffer`` and the pool live until ``close``.
    Outcomes and errors
        ``DeviceError`` if the device has no more queues, or a copy fails.
    """

    def __init__(
        self,
        pool: Pool,
        buffer: Memory,
        health: DiskHealth,
    ) -> None:
        device = pool.device
        assert device is not None, "the pool is in host memory"
        self.kind = pool.memory.kind
        self.engine: DirectEngine | None = None
        self._device = device
        self._memory = pool.memory
        self._allocations = pool.allocations
        ends = [
            (allocation.address, allocation.address + allocation.nbytes)
            for allocation in pool.allocations
        ]
        self._edges = np.unique(np.array(ends, np.uint64))
        self._buffer = buffer
        self._health = health
        with ExitStack() as undo:
            device.use()
            self._queue = device.make_queue(Direction.LOAD)
            undo.callback(self._queue.close)
            if device.page_lock(buffer):
                undo.callback(device.unlock, buffer)
            self._undo = undo.pop_all()

    def open(self, fd: int, may_bounce: bool) -> None:
        """Enable direct reads of the file ``fd``. may_bounce: see ``open_direct``.

        Raises ``TierError`` if the library refuses, for instance because the memory can't be
        pinned.
        """
        self.engine = open_direct(fd, self._device, self._allocations, may_bounce)

    def enter(self) -> bool:
        """Return whether blocks may be read directly now.

        They may not while direct reads keep failing, and never again after the driver hung.
        """
        engine = self.engine
        return engine is not None and not engine.is_given_up and self._health.breaker.enter()

    def holds(self, blocks: Pieces) -> Bools:
        """Return which blocks have each piece inside one registration: bool [n]."""
        assert self.engine is not None, "nothing goes directly"
        is_held = self.engine.holds(blocks.addresses, blocks.sizes)
        return np.asarray(is_held.all(axis=1))

    def note(self, done: Int64s) -> None:
        """Record the outcome of direct reads."""
        self._health.note("read", done)

    def copy(self, src: Uint64s, dst: Uint64s, size: Int64s) -> None:
        """Copy pieces from the buffer to the accelerator's memory.

        A piece that spans two allocations is split: no driver copies across them. src, dst:
            addresses of the pieces. size: bytes of each.
        """
        copies = Copies(dst, src, size.astype(np.uint64)).cut(dst, self._edges)
        batch = CopyBatch(
            self._buffer,
            self._memory,
            (copies.src - np.uint64(self._buffer.address)).astype(np.int64),
            (copies.dst - np.uint64(self._memory.address)).astype(np.int64),
            copies.size.astype(np.int64),
        )
        try:
            self._queue.submit(batch)
            self._queue.fence().wait()
        except BaseException:
            self._queue.drain()
            raise

    def state(self) -> str:
        """Describe why direct reads are suspended; "" while they are not."""
        given_up = [line.note for line in self.engine.findings()] if self.engine else []
        return next(filter(None, given_up), self._health.state())

    def close(self) -> None:
        """Release everything, except for memory that a driver may still use."""
        if self.engine is not None:
            self.engine.close()
        self._undo.close()
