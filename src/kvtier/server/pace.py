"""Long requests, slowly: so that short ones are served beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

PAUSE = 7.0
"""After a piece of work others have this many times as long."""


class Pace:
    """Says when the next piece of work may begin; what is alone need not wait.

    One for all that is to keep it together; safe to use from any thread. now: a clock, seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._next = 0.0
        self._lock = Lock()

    @property
    def wait_s(self) -> float:
        """Return how long to wait before a piece of work."""
        return max(0.0, self._next - self._now())

    def worked(self, spent_s: float) -> None:
        """A piece of work is done, and took ``spent_s``."""
        with self._lock:
            self._next = max(self._now(), self._next) + PAUSE * spent_s
