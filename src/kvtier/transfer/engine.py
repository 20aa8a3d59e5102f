"""Runs batches: one worker thread per direction, first come, first served."""

from __future__ import annotations

import logging
import queue
from threading import Thread
from time import perf_counter

from kvtier.devices.base import CopyBatch, Device, Direction, Fence
from kvtier.errors import CacheError, Closed, DeviceError
from kvtier.transfer.batching import split
from kvtier.transfer.job import Job

logger = logging.getLogger(__name__)

_Task = tuple[Job, CopyBatch, Fence]


class TransferEngine:
    """Copies in the background, so that the engine can compute meanwhile.

    A batch starts after the compute work that was queued when it was submitted: a store sees the
    finished KV, a load does not overwrite a slot that is still being read.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._queues: dict[Direction, queue.SimpleQueue[_Task | None]] = {}
        self._workers: list[Thread] = []
        self._pending: dict[Direction, list[Job]] = {direction: [] for direction in Direction}
        self._closed = False
        for direction in Direction:
            self._queues[direction] = queue.SimpleQueue()
            worker = Thread(
                target=self._work, args=(direction,), name=f"kvtier-{direction.value}", daemon=True
            )
            worker.start()
            self._workers.append(worker)

    def submit(self, batch: CopyBatch, direction: Direction) -> Job:
        """Queue a batch. The memories stay untouched by others until the job is done.

        What goes wrong is reported by the job, never raised.
        """
        if self._closed:
            raise Closed("the transfer engine is closed; make a new cache")
        job = Job(batch.num_bytes)
        try:
            fence = self._device.fence()
        except Exception as caught:
            job.finish(0.0, self._reported(caught, direction))
            return job
        self._pending[direction] = [old for old in self._pending[direction] if not old.done]
        self._pending[direction].append(job)
        self._queues[direction].put((job, batch, fence))
        return job

    def queued_bytes(self, direction: Direction) -> int:
        """Bytes that stand in line or are being copied."""
        return sum(job.num_bytes for job in self._pending[direction] if not job.done)

    def close(self) -> None:
        """Finish what was submitted, then stop the workers."""
        if self._closed:
            return
        self._closed = True
        for direction in Direction:
            self._queues[direction].put(None)
        for worker in self._workers:
            worker.join()

    def _work(self, direction: Direction) -> None:
        tasks = self._queues[direction]
        while (task := tasks.get()) is not None:
            job, batch, fence = task
            start = perf_counter()
            error: CacheError | None = None
            try:
                fence.wait()
                start = perf_counter()
                for piece in split(batch):
                    self._device.copy(piece, direction)
            except Exception as caught:  # a worker outlives every failure
                error = self._reported(caught, direction)
            job.finish(perf_counter() - start, error)

    def _reported(self, caught: Exception, direction: Direction) -> CacheError:
        """The error that the job shows, logged."""
        error: CacheError
        if isinstance(caught, CacheError):
            error = caught
        else:
            error = DeviceError(f"{self._device.name}: a {direction.value} failed: {caught!r}")
            error.__cause__ = caught
        logger.warning("transfer failed direction=%s error=%s", direction.value, error)
        return error
