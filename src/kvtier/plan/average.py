"""Moving averages by size."""

from __future__ import annotations

SMOOTHING = 0.2
"""Weight of the newest observation: about ten observations to forget an old regime. The first few
count alike: the very first one has often paid for something that comes only once."""


def size_class(size: int) -> int:
    """Powers of four: 0 for up to 3, 10 for 1 to 4 Mi."""
    return (max(size, 1).bit_length() - 1) // 2


FEW = 5
"""Fewer observations than this are too few to rely on: below it each of them moves the average by
more than ``SMOOTHING``."""


class Average:
    """Mean of all observations at first, and of the newest ones later."""

    __slots__ = ("num_seen", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.num_seen = 0

    def add(self, new: float) -> None:
        self.num_seen += 1
        self.value += max(SMOOTHING, 1 / self.num_seen) * (new - self.value)
