"""One transfer on its way."""

from __future__ import annotations

from threading import Event

from kvtier.errors import CacheError


class Job:
    """Becomes done once, with or without an error. Set by a worker, read by anyone.

    num_bytes: what is to be copied. seconds: what the copy took, without the time in line.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.seconds = 0.0
        self.error: CacheError | None = None
        self._done = Event()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def succeeded(self) -> bool:
        return self.done and self.error is None

    def finish(self, seconds: float, error: CacheError | None = None) -> None:
        """Called once, by whoever ran the transfer."""
        assert not self.done, "a job finishes once"
        self.seconds = seconds
        self.error = error
        self._done.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until done; False when ``timeout_s`` passed first. The job goes on then."""
        return self._done.wait(timeout_s)
