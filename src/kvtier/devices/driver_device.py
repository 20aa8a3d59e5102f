"""Device over a vendor's driver: queues on streams, and the fastest supported copy path."""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.core.errors import DeviceError
from kvtier.core.system.process import OwnerProcess
from kvtier.devices.base import CopyBatch, CopyQueue, Device, Direction, Fence, Finding, Memory
from kvtier.devices.calibration import calibrate
from kvtier.devices.compute import ComputeStream, Handle
from kvtier.devices.copies import Copies
from kvtier.devices.driver import Driver
from kvtier.devices.kernel import CopyKernel
from kvtier.devices.library import DriverError
from kvtier.devices.path_table import PathTable, load_table, save_table, table_path
from kvtier.devices.paths import CopyPath, CopyPaths
from kvtier.devices.synchronous import Passed

logger = logging.getLogger(__name__)

UInt64s = npt.NDArray[np.uint64]
Range = tuple[int, int]
"""Begin and end of a page-aligned piece of memory: addresses."""


class LockedRanges:
    """Disjoint, immutable ranges of addresses. Thread-safe.

    A driver call can copy only within one page-locked piece, even if two pieces are adjacent.
    """

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges = sorted(ranges)
        table = np.array(self._ranges, np.uint64).reshape(-1, 2)
        self._begins, self._ends = table[:, 0].copy(), table[:, 1].copy()
        self._edges = np.unique(table)

    def plus(self, ranges: Iterable[Range]) -> LockedRanges:
        """Return these ranges and the ones given."""
        return LockedRanges([*self._ranges, *ranges])

    def minus(self, ranges: Iterable[Range]) -> LockedRanges:
        """Return these ranges without the ones given."""
        gone = set(ranges)
        return LockedRanges([range_ for range_ in self._ranges if range_ not in gone])

    def fit(self, copies: Copies, direction: Direction) -> tuple[Copies, bool]:
        """Return the copies, none of which crosses an edge of a range on the host's side.

        The second value is whether that side of each copy lies in a range.
        """
        if self._contain(copies.host_side(direction), copies.size):
            return copies, True  # the usual case
        copies = copies.cut(copies.host_side(direction), self._edges)
        return copies, self._contain(copies.host_side(direction), copies.size)

    def _contain(self, begin: UInt64s, size: UInt64s) -> bool:
        """Whether each of these pieces lies in one range. Both uint64 [num_pieces]."""
        if not len(begin) or not len(self._begins):
            return not len(begin)
        end = begin + size
        first, last = begin.min(), end.max()
        if len(self._begins) == 1:
            return bool(self._begins[0] <= first and last <= self._ends[0])
        at = np.searchsorted(self._begins, begin, "right") - 1
        return bool(self._begins[0] <= first and (end <= self._ends[at]).all())


class DriverDevice(Device):
    """Copies on one stream per direction, ordered by events, with page-locked host memory.

    compute_stream: the stream that the engine computes on.
    kernel: copies small fragments, if available.
    """

    def __init__(
        self, driver: Driver, compute_stream: ComputeStream, kernel: CopyKernel | None = None
    ) -> None:
        self.name = driver.name
        self.process = OwnerProcess()
        self.driver = driver
        self.compute_stream = compute_stream
        self.paths = CopyPaths(driver, kernel)
        self._table: PathTable | None = None
        self.locked = LockedRanges()
        self._lock = threading.Lock()
        self._queues: dict[Direction, StreamQueue] = {}

    @property
    def numa_node(self) -> int | None:
        return self.driver.numa_node

    def queue(self, direction: Direction) -> CopyQueue:
        return self.stream_queue(direction)

    def stream_queue(self, direction: Direction) -> StreamQueue:
        """Return the queue of a direction."""
        with self._lock:
            if direction not in self._queues:
                self.driver.use()
                self._queues[direction] = StreamQueue(self, direction)
            return self._queues[direction]

    def make_queue(self, direction: Direction) -> CopyQueue:
        self.driver.use()
        return StreamQueue(self, direction)

    def use(self) -> None:
        self.driver.use()

    def fence(self) -> Fence:
        stream = self.compute_stream()
        if stream is None:
            return Passed()
        self.driver.use()
        return EventFence(self, self.driver.record(stream))

    # -- copies -----------------------------------------------------------------------------------

    def prepare(self, again: bool = False) -> None:
        path = table_path(self.driver.identity)
        table = None if again else load_table(path)
        if table is None or not table.tried.issuperset(self.paths.usable):
            try:
                table = calibrate(self)
            except DeviceError as error:
                logger.warning("%s: copies could not be measured: %s", self.name, error)
                return
            save_table(table, path, self.driver.identity)
        self._table = table
        self.paths.rank(table)

    def ways(self) -> Mapping[str, Callable[[CopyBatch, Direction], None]]:
        return {path.value: partial(self.copy_by, path) for path in self.paths.usable}

    def copy_by(self, path: CopyPath, batch: CopyBatch, direction: Direction) -> None:
        """Copy like ``copy``, but only by this path."""
        queue = self.stream_queue(direction)
        try:
            queue.submit(batch, path)
            queue.fence().wait()
        finally:
            queue.drain()

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Memory:
        self.driver.use()
        return Memory(self.driver.allocate(nbytes), nbytes, self.name, None)

    def free(self, memory: Memory) -> None:
        self.driver.use()
        self.driver.free(memory.address)

    def page_lock(self, memory: Memory) -> bool:
        if memory.address % mmap.PAGESIZE:
            logger.info("page_lock refused address=%#x reason=not on a page", memory.address)
            return False
        pieces = list(self._pieces(memory))
        locked: list[tuple[int, int]] = []
        try:
            self.driver.use()
            for start, end in pieces:
                self.driver.lock(start, end - start)
                locked.append((start, end))
        except DriverError as error:
            logger.info("page_lock refused bytes=%d error=%s", memory.nbytes, error)
            self._unlock(locked)
            return False
        with self._lock:
            self.locked = self.locked.plus(pieces)
        return True

    def unlock(self, memory: Memory) -> None:
        pieces = list(self._pieces(memory))
        self._unlock(pieces)
        with self._lock:
            self.locked = self.locked.minus(pieces)

    def _unlock(self, pieces: Iterable[tuple[int, int]]) -> None:
        """Unlock pieces. Errors are only logged: a lost device must not prevent shutdown."""
        for start, end in pieces:
            try:
                self.driver.use()
                self.driver.unlock(start)
            except DriverError as error:
                logger.info("%s unlock bytes=%d error=%s", self.name, end - start, error)

    def _pieces(self, memory: Memory) -> list[tuple[int, int]]:
        """Return pieces that can each be page-locked in one call: (begin, end), whole pages."""
        end = memory.address + -(-memory.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        step = self.driver.max_lock_bytes
        return [(at, min(at + step, end)) for at in range(memory.address, end, step)]

    def close(self) -> None:
        if not self.process.is_here:
            return  # drivers do not support forks: the resources are the parent's
        with self._lock:
            for queue in self._queues.values():
                queue.close()
            self._queues.clear()
        with suppress(DriverError):
            self.driver.use()
        self.paths.close()

    # -- for doctor -------------------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        return [
            Finding("device", self.name),
            *self.driver.describe(),
            self.paths.finding(),
            *self._measured(),
        ]

    def _measured(self) -> list[Finding]:
        table = self._table or load_table(table_path(self.driver.identity))
        if table is None:
            note = "measured when it is first used; or now: kvtier bench copy"
            return [Finding("fastest copies", "not measured yet", note)]
        return table.findings()


class EventFence(Fence):
    """A point in a stream, marked by an event."""

    def __init__(self, device: DriverDevice, event: Handle) -> None:
        self._device = device
        self.event = event
        weakref.finalize(self, _forget, device.process, device.driver, event).atexit = False

    @property
    def passed(self) -> bool:
        self._device.driver.use()
        return self._device.driver.has_passed(self.event)

    def wait(self) -> None:
        self._device.driver.use()
        self._device.driver.wait(self.event)

    def hold_compute(self) -> None:
        stream = self._device.compute_stream()
        if stream is None:
            self.wait()
        else:
            self._device.driver.use()
            self._device.driver.hold_stream(stream, self.event)


def _forget(process: OwnerProcess, driver: Driver, event: Handle) -> None:
    if not process.is_here:
        return
    try:
        driver.use()
        driver.forget(event)
    except DriverError as error:
        logger.debug("event lost error=%s", error)


class StreamQueue(CopyQueue):
    """A stream for the copies of one direction."""

    def __init__(self, device: DriverDevice, direction: Direction) -> None:
        self._device = device
        self._direction = direction
        self._stream = device.driver.new_stream()
        # Arrays of addresses that the driver may still read, kept until a later fence passes.
        self._unfenced: list[object] = []
        self._fenced: deque[tuple[EventFence, list[object]]] = deque()

    def hold_for(self, fence: Fence) -> None:
        if isinstance(fence, EventFence):
            self._device.driver.use()
            self._device.driver.hold_stream(self._stream, fence.event)
        else:
            fence.wait()

    def submit(self, batch: CopyBatch, only: CopyPath | None = None) -> None:
        """Queue all copies of the batch. only: the one path to use."""
        self._device.driver.use()
        while self._fenced and self._fenced[0][0].passed:
            self._fenced.popleft()
        copies, is_reachable = self._device.locked.fit(Copies.of(batch), self._direction)
        self._unfenced += self._device.paths.submit(
            copies, self._direction, self._stream, is_reachable, only
        )

    def fence(self) -> Fence:
        self._device.driver.use()
        fence = EventFence(self._device, self._device.driver.record(self._stream))
        self._fenced.append((fence, self._unfenced))
        self._unfenced = []
        return fence

    def drain(self) -> None:
        try:
            self._device.driver.use()
            self._device.driver.synchronize(self._stream)
        except DriverError as error:  # the error was reported where it was noticed first
            logger.info("%s drained error=%s", self._device.name, error)
        self._unfenced.clear()
        self._fenced.clear()

    def close(self) -> None:
        """Destroy the stream."""
        self.drain()
        try:
            self._device.driver.free_stream(self._stream)
        except DriverError as error:
            logger.info("%s stream not given back error=%s", self._device.name, error)
