"""Long requests, slowly: so that short ones are served beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

PAUSE = 3.0
"""After a piece of work others have this many times as long."""


class Pace:
    """Says when the next piece of work may begin. One for all that is to keep it together; safe to
    use from any thread. now: a clock, seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._next = 0.0
        self._lock = Lock()

    def rest(self, spent_s: float) -> float:
        """Seconds to wait after a piece of work that took ``spent_s``."""
        with self._lock:
            now = self._now()
            self._next = max(now, self._next) + PAUSE * spent_s
            return self._next - now
