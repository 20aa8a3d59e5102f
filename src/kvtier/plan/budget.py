"""Write budget of a disk with limited endurance."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvtier.core.errors import ConfigError

DAY_S = 86400


class WriteBudget:
    """Token bucket of written bytes: on average at most ``bytes_per_day``.

    bytes_per_day: 0 for no limit.
    burst_bytes: maximum saved up; None for an hour's worth.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        bytes_per_day: int,
        burst_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if bytes_per_day < 0 or (burst_bytes is not None and burst_bytes < 1):
            raise ConfigError(
                f"write budget: {bytes_per_day} bytes per day with a burst of {burst_bytes}; give "
                "0 (no limit) or more bytes per day, and a burst of at least one byte"
            )
        self.bytes_per_day = bytes_per_day
        self.burst_bytes = max(1, bytes_per_day // 24) if burst_bytes is None else burst_bytes
        self._clock = clock
        self._level = float(self.burst_bytes)
        self._filled_at = clock()

    @property
    def allows(self) -> bool:
        """Whether anything may be written now.

        A write larger than the remaining budget is allowed while any is left, so no batch is too
        large for the bucket. Later writes wait until the excess is earned back.
        """
        return self.left_bytes >= 1

    def spend(self, num_bytes: int) -> None:
        """Spend ``num_bytes`` of the budget."""
        if self.bytes_per_day:
            self._fill()
            self._level -= num_bytes

    @property
    def share_left(self) -> float:
        """Saved share of the budget, 0 to 1; 1 if there is no limit."""
        if not self.bytes_per_day:
            return 1.0
        return max(0.0, self.left_bytes) / self.burst_bytes

    @property
    def left_bytes(self) -> float:
        """Bytes saved up; below 0 while a large write is being earned back."""
        if not self.bytes_per_day:
            return float("inf")
        self._fill()
        return self._level

    def _fill(self) -> None:
        now = self._clock()
        earned = max(0.0, now - self._filled_at) * self.bytes_per_day / DAY_S
        self._filled_at = max(now, self._filled_at)
        self._level = min(float(self.burst_bytes), self._level + earned)
