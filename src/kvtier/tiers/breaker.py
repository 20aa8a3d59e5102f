"""Circuit breaker: stops calls to a medium that keeps failing, and decides when to retry."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from threading import Lock
from typing import Final

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0


class BreakerState(IntEnum):
    """State of a storage tier. The larger value is the worse state.

    Closed: all calls pass. Half-open: one call passes now and then. Open: no call passes.
    ``CUT_SHORT``: all calls pass, but the slab's data file is shorter than it was; a ``Breaker``
    itself never has this state.
    """

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2
    CUT_SHORT = 3


class Breaker:
    """Circuit breaker. Any thread may use it.

    While calls succeed it is *closed*: every call passes. After ``failures_until_open`` failures in
    a row it is *open*: no call passes for a pause. Then it is *half-open*: one trial call passes. A
    success closes the breaker; a failure opens it again with twice the pause.

    If the outcome of a trial call is never noted, the next call may pass after another pause, or
    after ``trial_s`` if that is longer.

    clock: monotonic clock, in seconds.
    """

    def __init__(
        self, clock: Callable[[], float], failures_until_open: int = 1, trial_s: float = 0.0
    ) -> None:
        self._clock = clock
        self._limit = failures_until_open
        self._trial_s = trial_s
        self._lock = Lock()
        self._in_row = 0
        self._is_open = False
        self._is_tried = False
        self._pause_s = FIRST_PAUSE_S
        self._next_try = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the breaker has opened, and no call has succeeded since."""
        return self._is_open

    @property
    def is_tried(self) -> bool:
        """Whether a trial call may be in flight."""
        return self._is_tried

    @property
    def is_passable(self) -> bool:
        """Whether ``enter`` would return True now. Changes nothing."""
        return self.left_s <= 0

    @property
    def left_s(self) -> float:
        """Seconds until the next call may pass; 0 if one may pass now."""
        with self._lock:
            return max(0.0, self._next_try - self._clock()) if self._is_open else 0.0

    @property
    def state(self) -> BreakerState:
        """Current state. Changes nothing."""
        with self._lock:
            if not self._is_open:
                return BreakerState.CLOSED
            is_tried = self._is_tried or self._clock() >= self._next_try
            return BreakerState.HALF_OPEN if is_tried else BreakerState.OPEN

    def enter(self) -> bool:
        """Return whether a call may be made now. If so, the caller must ``note`` its outcome."""
        with self._lock:
            if not self._is_open:
                return True
            now = self._clock()
            if now < self._next_try:
                return False
            self._is_tried = True
            self._next_try = now + max(self._pause_s, self._trial_s)
            return True

    def note(self, succeeded: bool) -> bool:
        """Note the outcome of a call. Return whether it opened or closed the breaker."""
        with self._lock:
            was_open = self._is_open
            if succeeded:
                self._in_row, self._pause_s = 0, FIRST_PAUSE_S
                self._is_open = self._is_tried = False
                return was_open
            self._in_row += 1
            if not was_open and self._in_row < self._limit:
                return False
            if self._is_tried:  # else the call began before the breaker opened: no new evidence
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._is_open, self._is_tried = True, False
            self._next_try = self._clock() + self._pause_s
            return not was_open
