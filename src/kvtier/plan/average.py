"""Moving averages by size."""

from __future__ import annotations

SMOOTHING = 0.2
"""Weight of the newest observation: an old regime is forgotten after about ten. The first few count
equally, because the very first one often includes one-time costs."""


def size_class(size: int) -> int:
    """Return the class of a size, by powers of four: 0 for up to 3, 10 for 1 to 4 Mi."""
    return (max(size, 1).bit_length() - 1) // 2


FEW = 5
"""Fewer observations than this are unreliable: each of them moves the average by more than
``SMOOTHING``."""


class Average:
    """Mean of the first observations, then exponential moving average."""

    __slots__ = ("num_seen", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.num_seen = 0

    def add(self, new: float) -> None:
        self.num_seen += 1
        self.value += max(SMOOTHING, 1 / self.num_seen) * (new - self.value)
