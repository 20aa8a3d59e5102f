"""Worker threads with a queue of jobs."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic, perf_counter
from traceback import clear_frames

from kvtier.cache.transfer.job import Job
from kvtier.core.errors import CacheError, Closed
from kvtier.core.system.process import OwnerProcess

logger = logging.getLogger(__name__)

Work = Callable[[Job], Iterable[int]]
"""Does the work of a job and returns the positions of the blocks that it lost.

It may call ``job.start`` again to exclude time spent waiting for other work.
"""

Line = OrderedDict[Job, Work]
"""Queued jobs, the next one first; any of them can be removed."""


class Lane:
    """Runs jobs one after another: urgent ones first, in FIFO order within each queue.

    Its threads start with the first job unless ``start`` was called before.

    name: name of the threads, also used in the log.
    fails_as: creates the job's error from a message.
    num_workers: jobs that may run at a time.
    """

    def __init__(
        self, name: str, fails_as: Callable[[str], CacheError], num_workers: int = 1
    ) -> None:
        self.name = name
        self._process = OwnerProcess()
        self._fails_as = fails_as
        self._lock = Lock()
        self._tickets: SimpleQueue[None] = SimpleQueue()  # one per job; one per worker at the end
        self._urgent: Line = OrderedDict()
        self._patient: Line = OrderedDict()
        self._urgent_bytes = 0  # of queued jobs
        self._num_workers = num_workers
        self._running: dict[Job, None] = {}  # the oldest first
        self._workers: list[Thread] = []
        self._closed = False

    def start(self) -> None:
        """Start the threads now: they inherit the cores of the calling thread."""
        while len(self._workers) < self._num_workers:
            worker = Thread(target=self._run, name=f"kvtier-{self.name}", daemon=True)
            self._workers.append(worker)
            worker.start()

    def submit(
        self, work: Work, num_bytes: int, urgent: bool = True, job: Job | None = None
    ) -> Job:
        """Queue ``work``. Errors are reported by the job, never raised.

        urgent: False if nothing waits for the job yet.
        job: the job to use; by default a new ``Job``.

        Raises ``Closed`` after ``close``, and in a forked child, which does not have the thread.
        """
        self._process.must_be_here(f"the {self.name} lane")
        if self._closed:
            raise Closed(f"the {self.name} lane is closed; make a new cache")
        job = job or Job(num_bytes)
        self.start()
        with self._lock:
            if urgent:
                self._stand_in_line(job, work)
            else:
                self._patient[job] = work
        self._tickets.put(None)
        return job

    def fail(self, job: Job, caught: Exception) -> None:
        """End a new job that failed before it was queued."""
        job.finish(self._reported(caught))

    def hurry(self, job: Job) -> None:
        """Move ``job`` to the end of the urgent queue, because something waits for it now."""
        with self._lock:
            if (work := self._patient.pop(job, None)) is not None:
                self._stand_in_line(job, work)

    def _stand_in_line(self, job: Job, work: Work) -> None:
        self._urgent[job] = work
        self._urgent_bytes += job.num_bytes

    def withdraw(self, job: Job) -> bool:
        """Remove ``job`` from the queue of jobs that are not urgent; it counts as failed.

        Return False if it is not in that queue.
        """
        with self._lock:
            work = self._patient.pop(job, None)
        if work is not None:
            self._end_unbegun(job)
        return work is not None

    def cancel(self, jobs: Collection[Job]) -> bool:
        """Remove queued ``jobs``, urgent or not; they count as failed.

        Return False, and remove none, if one of them is not in a queue any more.
        """
        with self._lock:
            if any(job not in self._urgent and job not in self._patient for job in jobs):
                return False
            for job in jobs:
                if self._patient.pop(job, None) is None:
                    del self._urgent[job]
                    self._urgent_bytes -= job.num_bytes
        for job in jobs:
            self._end_unbegun(job)
        return True

    def _end_unbegun(self, job: Job) -> None:
        job.withdrawn = True
        job.finish(self._fails_as("withdrawn before it began"))

    @property
    def queued_bytes(self) -> int:
        """Bytes being moved, or queued ahead of a new urgent job."""
        with self._lock:
            return self._urgent_bytes + sum(job.num_bytes for job in self._running)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is running or queued."""
        with self._lock:
            return not self._running and not self._urgent and not self._patient

    @property
    def running_s(self) -> float:
        """Seconds that the current job has run or waited for a worker; 0 if idle."""
        with self._lock:
            waiting = next(iter(self._urgent), None)
            is_full = len(self._running) == self._num_workers
            job = next(iter(self._running)) if is_full else waiting
            return 0.0 if job is None else perf_counter() - job.started

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish urgent jobs, withdraw the others, then stop.

        Jobs still queued after ``timeout_s`` are withdrawn as well. Return False if a job is still
        running then: its thread is abandoned, because a call that hangs cannot be ended. In a
        forked child this does nothing.
        """
        if not self._process.is_here:
            return True
        self._closed = True
        self._withdraw_all(self._patient)
        for _ in self._workers:
            self._tickets.put(None)
        ends_at = None if timeout_s is None else monotonic() + timeout_s
        for worker in self._workers:
            worker.join(None if ends_at is None else max(0.0, ends_at - monotonic()))
        self._withdraw_all(self._urgent)
        return not any(worker.is_alive() for worker in self._workers)

    def _withdraw_all(self, line: Line) -> None:
        with self._lock:
            unwanted = list(line)
            line.clear()
            self._urgent_bytes = 0 if line is self._urgent else self._urgent_bytes
        for job in unwanted:
            self._end_unbegun(job)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            job, work = task
            error: CacheError | None = None
            lost: Iterable[int] = ()
            job.start()
            try:
                lost = work(job)
            except Exception as caught:  # a worker survives every failure
                error = self._reported(caught)
                clear_frames(caught.__traceback__)  # the error would keep the frames' objects alive
            with self._lock:
                del self._running[job]
            job.finish(error, lost)

    def _next(self) -> tuple[Job, Work] | None:
        """Wait for the next job. Return None once the lane is closed and its queues are empty."""
        while True:
            self._tickets.get()
            with self._lock:
                if line := self._urgent or self._patient:
                    job, work = line.popitem(last=False)
                    self._urgent_bytes -= job.num_bytes if line is self._urgent else 0
                    self._running[job] = None
                    return job, work
                if self._closed:
                    return None
            # The job of this ticket was withdrawn: wait for the next one.

    def _reported(self, caught: Exception) -> CacheError:
        """Log the error and return it as the job's error."""
        if isinstance(caught, CacheError):
            error = caught
        else:
            error = self._fails_as(f"a {self.name} failed: {caught!r}")
            error.__cause__ = caught
        logger.warning("transfer failed lane=%s error=%s", self.name, error)
        return error
