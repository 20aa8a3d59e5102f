"""I/O engine between one file and accelerator memory, using a vendor's file library.

The engine uses the best interface that the library has:

    vectors   one call for pieces that are neighbours in the file, wherever they lie in memory
    batch     one call submits many pieces, then their events are collected
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
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from enum import Enum
from functools import partial
from queue import SimpleQueue
from typing import Final

import numpy as np

from kvtier.core.errors import DeviceError, TierError
from kvtier.devices.base import Fence, Finding, Memory
from kvtier.devices.library import DriverError
from kvtier.tiers.disk.arrays import Bools, Int64s, Uint32s, Uint64s
from kvtier.tiers.disk.io.base import (
    IO_ALIGNMENT,
    IoEngine,
    check_batch,
    runs,
)
from kvtier.tiers.disk.io.batch_queue import PIECE_BYTES, BatchQueue
from kvtier.tiers.disk.io.file_library import FileLibrary, Vector, Vendor
from kvtier.tiers.disk.io.registered import (
    MAX_RUN_BYTES,
    MAX_RUN_PIECES,
    RegisteredBatch,
    RegisteredMemory,
)

logger = logging.getLogger(__name__)

NUM_THREADS: Final = 8
"""Threads per direction for synchronous calls."""
LOOK_S: Final = 0.0002
"""Pause between two looks at a fence."""
GRACE_S: Final = 5.0
"""Seconds after a deadline. A call that has not returned by then may never return, so the engine is
given up."""

NUM_REQUESTS: Final = 64
"""Maximum requests in flight per direction, if the library's bounce buffers could be set."""
NUM_REQUESTS_WITHOUT_POOL: Final = 16
"""The same if they could not. By default there are 64 buffers of 1 MiB, and a batch that finds none
free waits forever (NIXL #2070)."""
BOUNCE_POOL: Final = (
    (4, 2 * NUM_REQUESTS),
    (1024, 2 * NUM_REQUESTS),
    (PIECE_BYTES >> 10, 2 * NUM_REQUESTS),
)
"""(KiB, number) of the library's bounce buffers: enough for both directions."""

_given_up: list[DirectEngine] = []
"""Engines whose driver may still move bytes. They keep their memory referenced until the process
ends, so that it is not reused."""


class FileInterface(Enum):
    """Interface by which pieces are passed to the library."""

    VECTORS = "vectors"
    BATCH = "batch"
    SINGLE = "single"


class PendingFences:
    """Fences that each direction of transfers waits for, once per fence. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fences: dict[bool, deque[Fence]] = {False: deque(), True: deque()}

    def add(self, fence: Fence) -> None:
        with self._lock:
            for fences in self._fences.values():
                while fences and _has_passed(fences[0]):  # bounds the queue of an unused direction
                    fences.popleft()
                fences.append(fence)

    def wait(self, write: bool, ends_at: float | None) -> int:
        """Wait until the fences of a direction have passed. Return 0, or -errno.

        ECANCELED: ``ends_at`` (``monotonic``) came first. EIO: the work before a fence failed. The
        remaining fences are kept for the next call.
        """
        with self._lock:
            fences, self._fences[write] = self._fences[write], deque()
        code = 0
        while fences and not code:
            try:
                if ends_at is None:
                    fences[0].wait()
                elif not _passes(fences[0], ends_at):
                    code = -errno.ECANCELED
                    break
            except DeviceError as error:
                logger.warning("a transfer waited for work that failed: %s", error)
                code = -errno.EIO
            fences.popleft()
        with self._lock:
            self._fences[write].extendleft(reversed(fences))
        return code


def _passes(fence: Fence, ends_at: float) -> bool:
    """Wait for a fence; return whether it passed in time."""
    while not fence.passed:
        if time.monotonic() >= ends_at:
            return False
        time.sleep(LOOK_S)
    return True


def _has_passed(fence: Fence) -> bool:
    try:
        return fence.passed
    except DeviceError:
        return False  # ``wait`` reports the error


class Workers:
    """Pool of ``num_threads`` threads, started with the first job.

    They are daemon threads, unlike those of ``ThreadPoolExecutor``: a thread that hangs in a driver
    must not keep the process from ending.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self.num_threads = num_threads
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def run(self, work: Callable[[], None], num_jobs: int) -> list[Future[None]]:
        """Queue ``work`` ``num_jobs`` times."""
        if not self._threads and num_jobs:
            for number in range(self.num_threads):
                name = f"{self._name}-{number}"
                self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
                self._threads[-1].start()
        jobs: list[Future[None]] = [Future() for _ in range(num_jobs)]
        for job in jobs:
            self._jobs.put((work, job))
        return jobs

    def close(self) -> None:
        """Stop the threads. None may be working."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _serve(self) -> None:
        while (next_job := self._jobs.get()) is not None:
            work, job = next_job
            try:
                work()
            except BaseException as error:
                job.set_exception(error)
            else:
                job.set_result(None)


class DirectEngine(IoEngine):
    """``IoEngine`` for accelerator memory.

    The caller guarantees besides
        ``probe`` has succeeded: without a driver, opening one may take forever. ``fd`` was opened
        with O_DIRECT. ``buffers`` contain every address. Each buffer is an allocation or lies
        within one, and lives until ``close``, or forever if ``is_given_up``. Transfers are not
        ordered against compute: the caller calls ``hold_for`` before a batch whose memory compute
        may still use.
    The implementer provides besides
        a call waits for driver calls that have begun, and for batches whose cancellation is not
        confirmed. ``GRACE_S`` after the deadline the engine is given up: the hanging call still
        returns only when the driver is done, if ever, so its memory stays safe. All other calls
        return -EIO immediately, ``close`` releases nothing, and the buffers stay referenced until
        the process ends.
    Outcomes and errors besides
        -EFAULT for a piece outside of ``buffers``. -EIO for all pieces if the accelerator is lost,
        or the work before a fence failed. ``read_checked`` raises ``TierError``: the CPU can't
        compute checksums of this memory.

    Args:
        vendor: the file library.
        fd: descriptor of the file.
        buffers: accelerator memory to register.
        use: makes the accelerator current for the calling thread.
        interface: interface of the library to use; the best one by default.
        num_threads: threads per direction for synchronous calls.

    Raises:
        TierError: the library, its driver, the file system or the memory is not usable.
    """

    def __init__(
        self,
        vendor: Vendor,
        fd: int,
        buffers: Sequence[Memory],
        use: Callable[[], None],
        interface: FileInterface | None = None,
        num_threads: int = NUM_THREADS,
    ) -> None:
        super().__init__(fd)
        self.vendor, self.name = vendor, vendor.name
        self._lock = threading.Lock()
        self._use = use
        self._why_given_up = ""
        self._fences = PendingFences()
        if not self._direct:
            raise self._refusal("the file was opened without O_DIRECT")
        self._memory = RegisteredMemory(buffers)
        with ExitStack() as undo:
            # A duplicate: if the driver hangs, the number must not be reused for another file.
            self._fd = os.dup(fd)
            undo.callback(os.close, self._fd)
            try:
                self._library = FileLibrary(self.vendor)
                self.interface = interface or best_interface(self._library)
                self._open(undo)
            except DeviceError as error:
                raise self._refusal(str(error)) from error
            self._undo = undo.pop_all()
        num_workers = 1 if self.interface is FileInterface.BATCH else num_threads
        self._workers = {
            write: Workers(f"kvtier-{self.vendor.name}-{word}", num_workers)
            for write, word in ((False, "read"), (True, "write"))
        }

    @property
    def is_given_up(self) -> bool:
        """Whether the engine was given up, because its driver may move bytes at any later time.

        The remedy is another engine with other memory, or the end of the process.
        """
        return bool(self._why_given_up)

    def hold_for(self, fence: Fence) -> None:
        """Delay all later reads and writes until ``fence`` has passed. Thread-safe."""
        self._fences.add(fence)

    def holds(self, addresses: Uint64s, sizes: Int64s) -> Bools:
        """Return which pieces lie entirely in one of ``buffers``. The library refuses others."""
        return np.asarray(self._memory.bases(addresses, sizes) != 0)

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
            f"{self.vendor.name} reads into memory that the CPU can't access; read blocks to "
            "verify through host memory",
        )

    def findings(self) -> list[Finding]:
        words = {
            FileInterface.VECTORS: "one call per run of pieces",
            FileInterface.BATCH: "batches",
            FileInterface.SINGLE: "one call per piece",
        }[self.interface]
        return [Finding("disk I/O", f"{self._library}, {words}", self._why_given_up)]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if not self._process.is_here:
            return  # a forked child has no driver; releasing would affect its parent
        if self.is_given_up:
            return
        for workers in self._workers.values():
            workers.close()
        self._undo.close()

    # -- opening ----------------------------------------------------------------------------------

    def _open(self, undo: ExitStack) -> None:
        """Open the driver, and register file, memory and batches; ``undo`` reverts it."""
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
        if self.interface is FileInterface.BATCH:
            most = NUM_REQUESTS if has_pool else NUM_REQUESTS_WITHOUT_POOL
            most = min(most, library.limits().max_batch or most)
            for write in (False, True):
                queue = BatchQueue(library, handle, most, self._give_up)
                undo.callback(self._quietly, queue.close)
                self._batches[write] = queue

    def _allow_pinning(self) -> None:
        """Raise the driver's limit on pinned memory if the registrations exceed it."""
        wanted = sum(memory.nbytes for memory in self._memory.memories)
        allowed = self._library.limits().max_pinned_bytes
        if 0 < allowed < wanted and self._library.has("DriverSetMaxPinnedMemSize"):
            code = self._library.code("DriverSetMaxPinnedMemSize", -(-wanted // 1024))
            logger.info("pinned memory bytes=%d allowed=%d code=%d", wanted, allowed, code)

    def _quietly(self, call: Callable[[], None]) -> None:
        """Release a resource; log an error, so that the others are released, too."""
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
        check_batch(offsets, addresses, sizes, self._direct)
        ends_at = None if deadline_s is None else time.monotonic() + deadline_s
        bases = self._memory.bases(addresses, sizes)
        results = np.where(sizes == 0, 0, -errno.EFAULT).astype(np.int64)
        chosen = np.flatnonzero((bases != 0) & (sizes > 0))
        if not len(chosen):
            return results
        code = -errno.EIO if self.is_given_up else self._fences.wait(write, ends_at)
        results[chosen] = code or -errno.EIO  # for pieces that no worker moves
        if code:
            return results
        batch = RegisteredBatch(
            write, offsets.tolist(), addresses.tolist(), bases.tolist(), sizes.tolist(),
            ends_at, results,
        )  # fmt: skip
        order: list[int] = chosen[np.argsort(offsets[chosen], kind="stable")].tolist()
        jobs = self._start(batch, order)
        if ends_at is not None:
            left_s = max(0.0, ends_at - time.monotonic()) + GRACE_S
            if wait(jobs, left_s).not_done:
                self._give_up("a call does not return")
        for job in wait(jobs).done:
            job.result()
        return results

    def _start(self, batch: RegisteredBatch, order: list[int]) -> list[Future[None]]:
        workers = self._workers[batch.write]
        if self.interface is FileInterface.BATCH:
            queue = self._batches[batch.write]
            return workers.run(self._on_device(partial(queue.move, batch, order, GRACE_S)), 1)
        most = MAX_RUN_PIECES if self.interface is FileInterface.VECTORS else 1
        offsets, sizes = np.array(batch.offsets)[order], np.array(batch.sizes)[order]
        left = deque(runs(offsets, sizes, MAX_RUN_BYTES, MAX_RUN_BYTES, most))

        def work() -> None:
            with suppress(IndexError):  # no runs are left
                while True:
                    self._move_run(batch, order[left.popleft()])

        return workers.run(self._on_device(work), min(workers.num_threads, len(left)))

    def _on_device(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return ``work`` with the accelerator made current; it does nothing if that fails."""

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

    # -- synchronous calls ------------------------------------------------------------------------

    def _move_run(self, batch: RegisteredBatch, run: list[int]) -> None:
        """Move pieces that are neighbours in the file, and set their results."""
        size, done, code = sum(batch.sizes[piece] for piece in run), 0, batch.ended()
        while done < size:
            if batch.is_late:
                code = -errno.ECANCELED
                break
            moved = self._move_rest(batch, run, done)
            if moved < 0 and len(run) > 1:
                # Find the piece with the error. Moving a piece again is harmless.
                for piece in run:
                    self._move_run(batch, [piece])
                return
            if moved < 0:
                code = moved
                break
            done += moved
            # A partial page means the end of the file; no read may begin there.
            if not moved or moved % IO_ALIGNMENT:
                break
        for piece in run:
            there = min(max(done, 0), batch.sizes[piece])
            batch.results[piece] = there if there == batch.sizes[piece] or code == 0 else code
            done -= batch.sizes[piece]

    def _move_rest(self, batch: RegisteredBatch, run: list[int], done: int) -> int:
        """Move the bytes of a run after the first ``done`` ones; return bytes or -errno."""
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


def best_interface(library: FileLibrary) -> FileInterface:
    """Return the best interface that a library has."""
    if library.has("Readv") and library.has("Writev"):
        return FileInterface.VECTORS
    if library.has("BatchIOGetStatus"):
        return FileInterface.BATCH
    return FileInterface.SINGLE
