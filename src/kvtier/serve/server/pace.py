"""Throttle for long requests, so that short ones are served meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

PAUSE = 7.0
"""Length of the pause after a piece of work, relative to its duration."""


class Pace:
    """Says when the next piece of work may begin.

    One object paces all work that uses it. Thread-safe.

    now: clock, seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._next = 0.0
        self._lock = Lock()

    @property
    def wait_s(self) -> float:
        """Seconds to wait before the next piece of work."""
        return max(0.0, self._next - self._now())

    def worked(self, spent_s: float) -> None:
        """Record a piece of work that took ``spent_s``."""
        with self._lock:
            self._next = max(self._now(), self._next) + PAUSE * spent_s
