"""When to leave something alone that fails, and when to try it again."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

FAILURES_UNTIL_OPEN = 3
"""In a row: one may be chance."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Breaker:
    """Closed: everything passes. Open: nothing does, for a while. Then half open: one call passes,
    and how it ends decides; each failed one doubles the pause.

    clock: seconds. Any thread may use it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = Lock()
        self._in_row = 0
        self._pause_s = 0.0
        self._closes_at: float | None = None
        self._is_trying = False

    @property
    def is_open(self) -> bool:
        """Whether a call would be refused now. Changes nothing."""
        with self._lock:
            return self._refuses()

    def _refuses(self) -> bool:
        if self._closes_at is None:
            return False
        return self._is_trying or self._clock() < self._closes_at

    def admit(self) -> bool:
        """Whether a call may be made now; ``note`` has to follow then."""
        with self._lock:
            if self._refuses():
                return False
            self._is_trying = self._closes_at is not None
            return True

    def note(self, succeeded: bool) -> bool:
        """How a call ended. Returns whether that opened or closed the breaker."""
        with self._lock:
            was_open = self._closes_at is not None
            self._is_trying = False
            if succeeded:
                self._in_row, self._pause_s, self._closes_at = 0, 0.0, None
                return was_open
            self._in_row += 1
            if not was_open and self._in_row < FAILURES_UNTIL_OPEN:
                return False
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
            self._closes_at = self._clock() + self._pause_s
            return not was_open

    @property
    def left_s(self) -> float:
        """Until the next call may be made; 0 where one may be made now."""
        with self._lock:
            return 0.0 if self._closes_at is None else max(0.0, self._closes_at - self._clock())
