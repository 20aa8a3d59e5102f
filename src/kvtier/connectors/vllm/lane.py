"""One thread that does jobs in order, for an owner that never waits for it unless it wants to."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Done(Generic[Job, Result]):
    """A job that was done. result: None where it failed. seconds: that it took, without its wait
    for those before it."""

    job: Job
    result: Result | None
    seconds: float


class Lane(Generic[Job, Result]):
    """Calls ``work`` with one job after the other, on a thread called ``name``.

    An exception of ``work`` is logged, and the job's result is None.
    """

    def __init__(self, name: str, work: Callable[[Job], Result]) -> None:
        self._name = name
        self._work = work
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done: deque[Done[Job, Result]] = deque()
        self._num_open = 0
        self._changed = Condition()
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Do it after those that were submitted before."""
        with self._changed:
            self._num_open += 1
        self._jobs.put(job)

    def take(self) -> list[Done[Job, Result]]:
        """Jobs that were done since the last call, in order."""
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until every job is done; whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_open, timeout_s)

    def close(self) -> None:
        """End the thread after the jobs that it has."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended, at the latest after ``timeout_s``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            began = time.perf_counter()
            result = None
            try:
                result = self._work(job)
            except Exception:
                logger.exception("%s: a job failed", self._name)
            self._done.append(Done(job, result, time.perf_counter() - began))
            with self._changed:
                self._num_open -= 1
                self._changed.notify_all()
