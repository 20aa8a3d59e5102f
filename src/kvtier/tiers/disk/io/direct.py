"""Accelerator memory <-> one file, by a vendor's library, past host memory where the machine can.

Three ways, the best that the library has:

    vectors   one call for pieces that follow each other in the file, wherever they lie in memory
    batch     many pieces are begun by one call, and their events waited for
    single    one call per piece
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import Enum
from functools import partial
from typing import Final

import numpy as np

from kvtier.devices.base import Fence, Finding, Memory
from kvtier.devices.library import DriverError
from kvtier.errors import DeviceError, TierError
from kvtier.system.process import OwnerProcess
from kvtier.tiers.disk.io.base import (
    IO_ALIGNMENT,
    Bools,
    Int64s,
    IoEngine,
    Uint32s,
    Uint64s,
    check_batch,
    is_direct,
)
from kvtier.tiers.disk.io.batch_queue import PIECE_BYTES, BatchQueue
from kvtier.tiers.disk.io.fences import HeldFor
from kvtier.tiers.disk.io.file_library import FileLibrary, Vector, Vendor
from kvtier.tiers.disk.io.placed import MAX_RUN_BYTES, MAX_RUN_PIECES, Placed, Registered, runs
from kvtier.tiers.disk.io.workers import Latch, Workers

logger = logging.getLogger(__name__)

NUM_THREADS: Final = 8
"""Per direction, where a call returns when its bytes are there."""
GRACE_S: Final = 5.0
"""After a deadline. What is not back by then may never come back: the engine is given up."""

NUM_REQUESTS: Final = 64
"""Under way in a direction, where the buffers of the way through host memory could be set."""
NUM_REQUESTS_WITHOUT_POOL: Final = 16
"""And where they could not: by default there are 64 of 1 MiB, and a batch that finds none left
waits for ever (NIXL #2070)."""
BOUNCE_POOL: Final = (
    (4, 2 * NUM_REQUESTS),
    (1024, 2 * NUM_REQUESTS),
    (PIECE_BYTES >> 10, 2 * NUM_REQUESTS),
)
"""(KiB, number): enough for both directions."""

_given_up: list[DirectEngine] = []
"""Engines whose driver may still move bytes. They keep their memory for as long as the process
lives: nobody else may get it."""


class FileWay(Enum):
    """Way in which pieces are handed to the library."""

    VECTORS = "vectors"
    BATCH = "batch"
    SINGLE = "single"


class DirectEngine(IoEngine):
    """As ``IoEngine``, for addresses of an accelerator.

    The caller guarantees besides
        ``probe`` found that the machine can: opening a driver that is not there may take for ever.
        ``fd`` was opened with O_DIRECT. ``buffers`` hold every address, are whole allocations or
        lie within one, and live until ``close``, or for ever where ``is_given_up``. Nothing here is
        ordered against compute: before a batch that computing may still write to, or read from,
        ``hold_for`` is called.
    The implementer provides besides
        a driver's call that was begun is waited for, and so is a batch whose cancel is not
        confirmed. ``GRACE_S`` after the deadline the engine is given up: that call still does not
        return before the driver is done, if ever, so whoever waits for it keeps its memory; every
        other one answers -EIO at once, ``close`` gives nothing back, and the buffers stay
        referenced until the process ends.
    Outcomes and errors besides
        -EFAULT for a piece outside of ``buffers``; -EIO for all where the accelerator is lost, or
        work failed that was to be waited for. ``read_checked`` raises ``TierError``: no processor
        sees these bytes.

    use: makes the accelerator the calling thread's. way: this one or none; the best by default.
    Raises ``TierError`` where the library, its driver, the file system or the memory won't do.
    """

    vendor: Vendor

    def __init__(
        self,
        fd: int,
        buffers: Sequence[Memory],
        use: Callable[[], None],
        way: FileWay | None = None,
        num_threads: int = NUM_THREADS,
    ) -> None:
        self._process = OwnerProcess()
        self._lock = threading.Lock()
        self._use = use
        self._is_closed = False
        self._why_given_up = ""
        self._held_for = HeldFor()
        if not is_direct(fd):
            raise self._refusal("the file was opened without O_DIRECT")
        self._memory = Registered(buffers)
        with ExitStack() as undo:
            # Of our own: where the driver does not let go, nobody else's file gets this number.
            self._fd = os.dup(fd)
            undo.callback(os.close, self._fd)
            try:
                self._library = FileLibrary(self.vendor)
                self.way = way or best_way(self._library)
                self._open(undo)
            except DeviceError as error:
                raise self._refusal(str(error)) from error
            self._undo = undo.pop_all()
        num_workers = 1 if self.way is FileWay.BATCH else num_threads
        self._workers = {
            write: Workers(f"kvtier-{self.vendor.name}-{word}", num_workers)
            for write, word in ((False, "read"), (True, "write"))
        }

    @property
    def is_given_up(self) -> bool:
        """Whether the driver may move bytes for longer than anybody waited.

        Open another engine, with other memory, or end the process.
        """
        return bool(self._why_given_up)

    def hold_for(self, fence: Fence) -> None:
        """Start all later reads and writes after ``fence``. Any thread."""
        self._held_for.add(fence)

    def holds(self, addresses: Uint64s, sizes: Int64s) -> Bools:
        """Return which pieces lie entirely in one of ``buffers``.

        The library refuses all others.
        """
        return np.asarray(self._memory.bases(addresses, sizes) != 0)

    def read(
        self, offsets: Int64s, addresses: Uint64s, sizes: Int64s, deadline_s: float | None = None
    ) -> Int64s:
        return self._transfer(False, offsets, addresses, sizes, deadline_s)

    def read_checked(
        self,
        offsets: Int64s,
        addresses: Uint64s,
        sizes: Int64s,
        num_checked: int,
        deadline_s: float | None = None,
    ) -> tuple[Int64s, Uint32s]:
        raise TierError(
            "disk",
            "read_checked",
            f"{self.vendor.name} brings bytes where no processor sees them; read what is to be "
            "checked by way of host memory",
        )

    def write(
        self, offsets: Int64s, addresses: Uint64s, sizes: Int64s, deadline_s: float | None = None
    ) -> Int64s:
        return self._transfer(True, offsets, addresses, sizes, deadline_s)

    def sync(self) -> None:
        self._check_open()
        os.fdatasync(self._fd)

    def findings(self) -> list[Finding]:
        words = {
            FileWay.VECTORS: "a call per run of pieces",
            FileWay.BATCH: "batches",
            FileWay.SINGLE: "a call per piece",
        }[self.way]
        return [Finding("disk I/O", f"{self._library}, {words}", self._why_given_up)]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if not self._process.is_here:
            return  # no driver survives a fork: what a child gave back would be its parent's
        if self.is_given_up:
            return
        for workers in self._workers.values():
            workers.close()
        self._undo.close()

    # -- opening ----------------------------------------------------------------------------------

    def _open(self, undo: ExitStack) -> None:
        """Driver, file, memory, batches; given back in the opposite order."""
        library = self._library
        self._use()
        has_pool = library.open(BOUNCE_POOL)
        undo.callback(self._quietly, library.close)
        handle = self._handle = library.register_file(self._fd)
        undo.callback(self._quietly, partial(library.deregister_file, handle))
        self._allow_pinning()
        for memory in self._memory.memories:
            library.register_memory(memory.address, memory.nbytes)
            undo.callback(self._quietly, partial(library.deregister_memory, memory.address))
        self._batches: dict[bool, BatchQueue] = {}
        if self.way is FileWay.BATCH:
            most = NUM_REQUESTS if has_pool else NUM_REQUESTS_WITHOUT_POOL
            most = min(most, self.vendor.limits(library).max_batch or most)
            for write in (False, True):
                queue = BatchQueue(library, handle, most, self._give_up)
                undo.callback(self._quietly, queue.close)
                self._batches[write] = queue

    def _allow_pinning(self) -> None:
        """Registered memory is pinned, which is bounded; the bound may be raised."""
        wanted = sum(memory.nbytes for memory in self._memory.memories)
        allowed = self.vendor.limits(self._library).max_pinned_bytes
        if 0 < allowed < wanted and self._library.has("DriverSetMaxPinnedMemSize"):
            code = self._library.code("DriverSetMaxPinnedMemSize", -(-wanted // 1024))
            logger.info("pinned memory bytes=%d allowed=%d code=%d", wanted, allowed, code)

    def _quietly(self, call: Callable[[], None]) -> None:
        """Release resources; an error of one does not keep the rest from being released."""
        for each in (self._use, call):
            try:
                each()
            except DeviceError as error:
                logger.warning("%s close error=%s", self.vendor.name, error)

    def _refusal(self, reason: str) -> TierError:
        return TierError("disk", self.vendor.name, reason)

    # -- a batch ----------------------------------------------------------------------------------

    def _transfer(
        self,
        write: bool,
        offsets: Int64s,
        addresses: Uint64s,
        sizes: Int64s,
        deadline_s: float | None,
    ) -> Int64s:
        self._check_open()
        check_batch(offsets, addresses, sizes, direct=True)
        ends_at = None if deadline_s is None else time.monotonic() + deadline_s
        bases = self._memory.bases(addresses, sizes)
        results = np.where(sizes == 0, 0, -errno.EFAULT).astype(np.int64)
        chosen = np.flatnonzero((bases != 0) & (sizes > 0))
        if not len(chosen):
            return results
        code = -errno.EIO if self.is_given_up else self._held_for.wait(write, ends_at)
        results[chosen] = code or -errno.EIO  # of what nobody comes to move
        if code:
            return results
        batch = Placed(
            write, offsets.tolist(), addresses.tolist(), bases.tolist(), sizes.tolist(),
            ends_at, results,
        )  # fmt: skip
        order: list[int] = chosen[np.argsort(offsets[chosen], kind="stable")].tolist()
        latch = self._start(batch, order)
        if ends_at is not None and not latch.wait(max(0.0, ends_at - time.monotonic()) + GRACE_S):
            self._give_up("a call does not come back")
        latch.wait()
        if latch.error is not None:
            raise latch.error
        return results

    def _start(self, batch: Placed, order: list[int]) -> Latch:
        workers = self._workers[batch.write]
        if self.way is FileWay.BATCH:
            queue = self._batches[batch.write]
            return workers.run(self._on_device(partial(queue.move, batch, order, GRACE_S)), 1)
        most = MAX_RUN_PIECES if self.way is FileWay.VECTORS else 1
        left = deque(runs(order, batch.offsets, batch.sizes, most))

        def work() -> None:
            while True:
                try:
                    run = left.popleft()
                except IndexError:
                    return  # others have the rest
                self._move_run(batch, run)

        return workers.run(self._on_device(work), min(workers.num_threads, len(left)))

    def _on_device(self, work: Callable[[], None]) -> Callable[[], None]:
        """``work`` on a thread that has the accelerator; not at all where that is lost."""

        def done_there() -> None:
            try:
                self._use()
            except DriverError as error:
                logger.warning("%s lost the accelerator: %s", self.vendor.name, error)
            else:
                work()

        return done_there

    def _give_up(self, reason: str) -> None:
        with self._lock:
            if self._why_given_up:
                return
            self._why_given_up = f"given up: {reason}; its memory is not used again"
            _given_up.append(self)
        logger.error("%s given up reason=%s", self.vendor.name, reason)

    # -- calls that return when their bytes are there ---------------------------------------------

    def _move_run(self, batch: Placed, run: list[int]) -> None:
        """Pieces that follow each other in the file."""
        size, done, code = sum(batch.sizes[piece] for piece in run), 0, batch.ended()
        while done < size:
            if batch.is_late:
                code = -errno.ECANCELED
                break
            moved = self._move_rest(batch, run, done)
            if moved < 0 and len(run) > 1:
                # Which piece is to blame? What was moved is moved again, to the same place.
                for piece in run:
                    self._move_run(batch, [piece])
                return
            if moved < 0:
                code = moved
                break
            done += moved
            # Only the end of the file cuts a page, and no read may begin there.
            if not moved or moved % IO_ALIGNMENT:
                break
        for piece in run:
            there = min(max(done, 0), batch.sizes[piece])
            batch.results[piece] = there if there == batch.sizes[piece] or code == 0 else code
            done -= batch.sizes[piece]

    def _move_rest(self, batch: Placed, run: list[int], done: int) -> int:
        """Move the bytes behind the first ``done`` of a run; return bytes, or -errno."""
        offset = batch.offsets[run[0]] + done
        left: list[tuple[int, int, int]] = []
        for piece in run:
            if (size := batch.sizes[piece]) > done:
                left.append((batch.bases[piece], batch.addresses[piece] + done, size - done))
            done = max(0, done - size)
        if len(left) == 1:
            ((base, address, size),) = left
            size = min(size, MAX_RUN_BYTES)
            return self._library.move(batch.write, self._handle, base, address, size, offset)
        vectors = (Vector * len(left))(*(Vector(address, size) for _, address, size in left))
        size = sum(size for _, _, size in left)
        return self._library.move_vectors(batch.write, self._handle, vectors, size, offset)


def best_way(library: FileLibrary) -> FileWay:
    """The best way that a library has."""
    if library.has("Readv") and library.has("Writev"):
        return FileWay.VECTORS
    if library.has("BatchIOGetStatus"):
        return FileWay.BATCH
    return FileWay.SINGLE
