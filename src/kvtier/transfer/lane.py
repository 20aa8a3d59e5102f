"""Worker threads, and the jobs that stand in line for them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic, perf_counter
from traceback import clear_frames

from kvtier.errors import CacheError, Closed
from kvtier.system.process import OwnerProcess
from kvtier.transfer.job import Job

logger = logging.getLogger(__name__)

Work = Callable[[Job], Iterable[int]]
"""Does what a job stands for, and gives the positions of the blocks that it lost. It may call
``start`` again, so that waiting for others does not count as work."""

Line = OrderedDict[Job, Work]
"""Jobs that stand in line, the first one in front; any of them may leave it."""


class Lane:
    """Runs jobs one after another: urgent ones first, and each line in its order.

    Its threads start with the first job, if ``start`` was not called before. name: of the threads,
    and in the log. fails_as: makes the error of a job out of what went wrong. num_workers: jobs
    that may run at a time.
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
        self._urgent_bytes = 0  # of those in line
        self._num_workers = num_workers
        self._running: dict[Job, None] = {}  # the oldest first
        self._workers: list[Thread] = []
        self._closed = False

    def start(self) -> None:
        """Start the threads now: they run on the cores of the thread that starts them."""
        while len(self._workers) < self._num_workers:
            worker = Thread(target=self._run, name=f"kvtier-{self.name}", daemon=True)
            self._workers.append(worker)
            worker.start()

    def submit(
        self, work: Work, num_bytes: int, urgent: bool = True, job: Job | None = None
    ) -> Job:
        """Queue ``work``. What goes wrong is reported by the job, never raised.

        urgent: False for what nobody waits for yet. job: a new one, if it is to be of a kind of its
        own. Raises ``Closed`` after ``close``, and in a forked child, which has not the thread.
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
        """End a new job that failed before it could stand in line."""
        job.finish(self._reported(caught))

    def hurry(self, job: Job) -> None:
        """Somebody waits for ``job`` now: it goes to the end of the urgent line."""
        with self._lock:
            if (work := self._patient.pop(job, None)) is not None:
                self._stand_in_line(job, work)

    def _stand_in_line(self, job: Job, work: Work) -> None:
        self._urgent[job] = work
        self._urgent_bytes += job.num_bytes

    def withdraw(self, job: Job) -> bool:
        """Take ``job`` out of the line of those that are not urgent; False if it is not in it.

        It counts as failed.
        """
        with self._lock:
            work = self._patient.pop(job, None)
        if work is not None:
            self._end_unbegun(job)
        return work is not None

    def _end_unbegun(self, job: Job) -> None:
        job.withdrawn = True
        job.finish(self._fails_as("not wanted any more"))

    @property
    def queued_bytes(self) -> int:
        """Bytes that are being moved, or have to be before a new urgent job's."""
        with self._lock:
            return self._urgent_bytes + sum(job.num_bytes for job in self._running)

    @property
    def is_idle(self) -> bool:
        """Nothing is running or standing in line."""
        with self._lock:
            return not self._running and not self._urgent and not self._patient

    @property
    def running_s(self) -> float:
        """Return how long the current job has run or waited for a worker, seconds; 0 if idle."""
        with self._lock:
            waiting = next(iter(self._urgent), None)
            is_full = len(self._running) == self._num_workers
            job = next(iter(self._running)) if is_full else waiting
            return 0.0 if job is None else perf_counter() - job.started

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish what is urgent, withdraw the rest, then stop.

        What stands in line still after ``timeout_s`` is withdrawn as well. False where something
        runs even then: a thread is left to itself, for nothing can end a call that hangs. Nothing
        happens in a forked child.
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
            except Exception as caught:  # a worker outlives every failure
                error = self._reported(caught)
                clear_frames(caught.__traceback__)  # or the error would keep what they work with
            with self._lock:
                del self._running[job]
            job.finish(error, lost)

    def _next(self) -> tuple[Job, Work] | None:
        """The job whose turn it is; None once the lane is closed and the line empty."""
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
            # The job of this ticket was withdrawn.

    def _reported(self, caught: Exception) -> CacheError:
        """The error that the job shows, logged."""
        if isinstance(caught, CacheError):
            error = caught
        else:
            error = self._fails_as(f"a {self.name} failed: {caught!r}")
            error.__cause__ = caught
        logger.warning("transfer failed lane=%s error=%s", self.name, error)
        return error
