"""One transfer on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock
from time import perf_counter

from kvtier.errors import CacheError


class Job:
    """Becomes done once, with or without an error. Set by a worker, read by anyone.

    num_bytes: what is to be moved. started: when its turn came, or when it was made
    (``perf_counter``). seconds: what it took, without the time in line. lost: positions of blocks
    that did not arrive though the job as a whole went well. gone: those of them that their source
    does not have, or not as they were; num_damaged: how many of these it had. withdrawn: it never
    began. is_late: it has taken longer than anything should, and may never end; it goes on, and
    what it moves from and to is in use.
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
        """Its turn has come: ``seconds`` count from now."""
        self.started = perf_counter()

    def finish(self, error: CacheError | None = None, lost: Iterable[int] = ()) -> None:
        """End the job. Called once, by whoever ran the transfer."""
        assert not self.done, "a job finishes once"
        self.seconds = perf_counter() - self.started
        self.error = error
        self.lost = frozenset(lost)
        self._is_done = True
        self._running.release()
        self._tell()

    def when_done(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` once it is done, on the thread that ends it; at once where it is done."""
        self._to_tell.append(tell)
        if self._is_done:
            self._tell()

    def _tell(self) -> None:
        """Two threads may be here: each of those to be told is taken by one of them."""
        while self._to_tell:
            try:
                tell = self._to_tell.pop()
            except IndexError:
                return
            tell()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until done; False when ``timeout_s`` passed first. The job goes on then."""
        if not self._is_done and self._running.acquire(
            timeout=-1 if timeout_s is None else timeout_s
        ):
            self._running.release()
        return self._is_done
