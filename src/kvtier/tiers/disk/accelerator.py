"""Blocks of a slab on their way into an accelerator's memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import CopyBatch, Device, Direction, Memory
from kvtier.devices.copies import Copies
from kvtier.tiers.disk.health import DiskHealth
from kvtier.tiers.disk.io import open_direct
from kvtier.tiers.disk.io.direct import DirectEngine
from kvtier.tiers.pieces import Pieces

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Accelerator:
    """Straight, by the vendor's file library, where ``open`` went well.

    Else the device copies what lies in a buffer. Either way the bytes are there when the call
    returns.

    memory: of ``device``. allocations: what of it blocks lie in, each registered by itself. buffer:
    host memory that it copies from, page-locked here. health: of direct moves.

    The caller guarantees
        one thread reads; what the device computes has been waited for, for nothing here is ordered
        against that; buffer and memory live until ``close``.
    Outcomes and errors
        ``DeviceError`` where the device has no more queues, and from a copy that fails.
    """

    def __init__(
        self,
        device: Device,
        memory: Memory,
        allocations: Sequence[Memory],
        buffer: Memory,
        health: DiskHealth,
    ) -> None:
        self.kind = memory.kind
        self.engine: DirectEngine | None = None
        self._device = device
        self._memory = memory
        self._allocations = allocations
        ends = [(each.address, each.address + each.nbytes) for each in allocations]
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
        """Let blocks of the file go directly.

        ``TierError`` where the library won't, for instance because the memory can't be pinned; see
        ``open_direct``.
        """
        self.engine = open_direct(fd, self._device, self._allocations, may_bounce)

    def enter(self) -> bool:
        """Whether blocks may go directly now.

        Not while that fails again and again, and never again where the driver hangs.
        """
        engine = self.engine
        return engine is not None and not engine.is_given_up and self._health.enter()

    def holds(self, blocks: Pieces) -> Bools:
        """Bool [n]: whose pieces all lie in memory that is registered, each as a whole."""
        assert self.engine is not None, "nothing goes directly"
        is_held = self.engine.holds(blocks.addresses, blocks.sizes)
        return np.asarray(is_held.all(axis=1))

    def note(self, done: Int64s) -> None:
        """Record the outcome of blocks that went directly."""
        self._health.note("read", done)

    def copy(self, src: npt.NDArray[np.uint64], dst: npt.NDArray[np.uint64], size: Int64s) -> None:
        """Pieces from the buffer to the accelerator's memory, by their addresses.

        In parts where they lie in several allocations, for no driver copies to two at a time.
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
        """Why blocks don't go directly now though they could; for people, empty while they do."""
        given_up = [line.note for line in self.engine.findings()] if self.engine else []
        return next(filter(None, given_up), self._health.state())

    def close(self) -> None:
        """Give everything back; what a driver has not let go stays as it is."""
        if self.engine is not None:
            self.engine.close()
        self._undo.close()
