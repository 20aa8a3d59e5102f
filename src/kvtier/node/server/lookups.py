"""Counts of the look-ups of engines: the places of blocks, and times."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from kvtier.cache.block_cache import BlockState
from kvtier.observe.specs import NODE_LOOKUP_SECONDS


class PlaceCounts:
    """Number of looked-up blocks by their place.

    Attributes:
        numbers: int64 [num_places], in the order of ``BlockState``.
    """

    def __init__(self) -> None:
        self.numbers = np.zeros(len(BlockState), np.int64)

    def add(self, codes: bytes) -> None:
        """Count blocks by the codes of their places, one byte each."""
        if codes and codes.count(codes[0]) == len(codes):  # as they usually are
            self.numbers[codes[0]] += len(codes)
        else:
            self.numbers += np.bincount(np.frombuffer(codes, np.uint8), minlength=len(BlockState))

    def by_place(self) -> dict[str, int]:
        """Return the numbers by the names of the places."""
        named = zip(BlockState, self.numbers.tolist(), strict=True)
        return {place.name.lower(): num for place, num in named}


class TimeCounts:
    """Number of look-ups by the time to their answer, as a histogram.

    Attributes:
        numbers: look-ups by bucket of ``NODE_LOOKUP_SECONDS.buckets``; the last one has no end.
        total_s: sum of all times.
    """

    def __init__(self) -> None:
        self.numbers = [0] * (len(NODE_LOOKUP_SECONDS.buckets) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a look-up."""
        self.numbers[bisect_left(NODE_LOOKUP_SECONDS.buckets, seconds)] += 1
        self.total_s += seconds

    def copy(self) -> TimeCounts:
        """Return a copy, for another thread."""
        made = TimeCounts()
        made.numbers, made.total_s = list(self.numbers), self.total_s
        return made
