"""Worker threads for calls of a driver, which may block for any time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]


class Latch:
    """Countdown latch that opens when all jobs are done. error: first error of a job."""

    def __init__(self, num_jobs: int) -> None:
        self._left = num_jobs
        self._lock = threading.Lock()
        self._opened = threading.Event()
        self.error: BaseException | None = None
        if not num_jobs:
            self._opened.set()

    def count(self, error: BaseException | None = None) -> None:
        """Count a finished job."""
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if not self._left:
                self._opened.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the latch opens; return False on timeout."""
        return self._opened.wait(timeout_s)


class Workers:
    """Pool of ``num_threads`` threads, started with the first job.

    They are daemon threads: a thread that hangs in a driver must not keep the process from ending.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self.num_threads = num_threads
        self._jobs: SimpleQueue[tuple[Work, Latch] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def run(self, work: Work, num_jobs: int) -> Latch:
        """Queue ``work`` ``num_jobs`` times; return a latch that opens when all have ended."""
        if not self._threads and num_jobs:
            for number in range(self.num_threads):
                name = f"{self._name}-{number}"
                self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
                self._threads[-1].start()
        latch = Latch(num_jobs)
        for _ in range(num_jobs):
            self._jobs.put((work, latch))
        return latch

    def close(self) -> None:
        """Stop the threads. None may be working."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, latch = job
            try:
                work()
            except BaseException as error:
                latch.count(error)
            else:
                latch.count()
