"""A transfer in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock
from time import perf_counter

from kvtier.core.errors import CacheError


class Job:
    """Transfer that becomes done once, with or without error. Set by a worker; any thread reads it.

    num_bytes: bytes to move.
    started: ``perf_counter`` when the work began, or when the job was made.
    seconds: duration without the time in the queue.
    lost: positions of blocks that did not arrive although the job as a whole succeeded.
    gone: those of ``lost`` that are absent from their source, or damaged there.
    num_damaged: how many of ``gone`` are damaged.
    withdrawn: whether the job was cancelled before it began.
    is_late: whether it has exceeded its time limit and may never end. It continues, and its memory
    is still in use.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.started = perf_counter()
        self.seconds = 0.0
        self.error: CacheError | None = None
        self.lost: frozenset[int] = frozenset()
        self.gone: frozenset[int] = frozenset()
        self.num_damaged = 0
        self.withdrawn = False
        self.is_late = False
        self._is_done = False
        self._to_tell: list[Callable[[], object]] = []
        self._running = Lock()  # held until it is done; cheaper than an Event
        self._running.acquire()

    @property
    def done(self) -> bool:
        return self._is_done

    @property
    def succeeded(self) -> bool:
        """Whether everything has arrived."""
        return self.done and self.error is None and not self.lost

    def start(self) -> None:
        """Restart the measurement of ``seconds``: the work begins now."""
        self.started = perf_counter()

    def finish(self, error: CacheError | None = None, lost: Iterable[int] = ()) -> None:
        """End the job. Called exactly once, by the worker that ran the transfer."""
        assert not self.done, "a job finishes once"
        self.seconds = perf_counter() - self.started
        self.error = error
        self.lost = frozenset(lost)
        self._is_done = True
        self._running.release()
        self._tell()

    def when_done(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` when the job ends, on the thread that ends it; at once if it is done."""
        self._to_tell.append(tell)
        if self._is_done:
            self._tell()

    def _tell(self) -> None:
        """Call the registered callbacks. If two threads are here, only one calls each callback."""
        while self._to_tell:
            try:
                tell = self._to_tell.pop()
            except IndexError:
                return
            tell()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until done. Return False if ``timeout_s`` passed first; the job continues."""
        if not self._is_done and self._running.acquire(
            timeout=-1 if timeout_s is None else timeout_s
        ):
            self._running.release()
        return self._is_done
