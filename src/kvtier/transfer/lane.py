"""One worker thread, and the jobs that stand in line for it."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable
from threading import Thread
from time import perf_counter

from kvtier.errors import CacheError, Closed
from kvtier.transfer.job import Job

logger = logging.getLogger(__name__)

Work = Callable[[Job], Iterable[int]]
"""Does what a job stands for, and gives the positions of the blocks that it lost. It may call
``start`` again, so that waiting for others does not count as work."""


class Lane:
    """Runs jobs one after another, first come, first served. Its thread starts with the first job.

    name: of the thread, and in the log. fails_as: makes the error of a job out of what went wrong.
    """

    def __init__(self, name: str, fails_as: Callable[[str], CacheError]) -> None:
        self.name = name
        self._fails_as = fails_as
        self._queue: queue.SimpleQueue[tuple[Job, Work] | None] = queue.SimpleQueue()
        self._pending: list[Job] = []
        self._worker: Thread | None = None
        self._closed = False

    def submit(self, work: Work, num_bytes: int) -> Job:
        """Queue ``work``. What goes wrong is reported by the job, never raised."""
        if self._closed:
            raise Closed(f"the {self.name} lane is closed; make a new cache")
        job = Job(num_bytes)
        self._pending = [old for old in self._pending if not old.done]
        self._pending.append(job)
        if self._worker is None:
            self._worker = Thread(target=self._run, name=f"kvtier-{self.name}", daemon=True)
            self._worker.start()
        self._queue.put((job, work))
        return job

    def fail(self, num_bytes: int, caught: Exception) -> Job:
        """A job that failed before it could stand in line."""
        job = Job(num_bytes)
        job.finish(self._reported(caught))
        return job

    @property
    def queued_bytes(self) -> int:
        """Bytes that stand in line or are being moved."""
        return sum(job.num_bytes for job in self._pending if not job.done)

    @property
    def running_s(self) -> float:
        """How long the job whose turn it is has been running; 0 for an idle lane."""
        running = next((job for job in self._pending if not job.done), None)
        return 0.0 if running is None else perf_counter() - running.started

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish what stands in line, then stop. False where that took longer than ``timeout_s``:
        the thread is left to itself then, for nothing else can end a call that hangs."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        if self._worker is None:
            return True
        self._worker.join(timeout_s)
        return not self._worker.is_alive()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            job, work = task
            error: CacheError | None = None
            lost: Iterable[int] = ()
            job.start()
            try:
                lost = work(job)
            except Exception as caught:  # a worker outlives every failure
                error = self._reported(caught)
            job.finish(error, lost)

    def _reported(self, caught: Exception) -> CacheError:
        """The error that the job shows, logged."""
        if isinstance(caught, CacheError):
            error = caught
        else:
            error = self._fails_as(f"a {self.name} failed: {caught!r}")
            error.__cause__ = caught
        logger.warning("transfer failed lane=%s error=%s", self.name, error)
        return error
