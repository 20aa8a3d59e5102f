"""Registry of page-locked host memory ranges."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]
Range = tuple[int, int]
"""Begin and end of a piece: addresses, in whole pages."""


class LockedRanges:
    """Disjoint ranges of addresses. Never changes, so any thread may look.

    A driver copies from one page-locked piece at a time, also where two are neighbours.
    """

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges = sorted(ranges)
        table = np.array(self._ranges, np.uint64).reshape(-1, 2)
        self._begins, self._ends = table[:, 0].copy(), table[:, 1].copy()
        self.edges = np.unique(table)
        """Where a copy has to be cut: uint64, sorted."""

    def plus(self, ranges: Iterable[Range]) -> LockedRanges:
        """These and those."""
        return LockedRanges([*self._ranges, *ranges])

    def minus(self, ranges: Iterable[Range]) -> LockedRanges:
        """These without those."""
        gone = set(ranges)
        return LockedRanges([each for each in self._ranges if each not in gone])

    def contain(self, begin: UInt64s, size: UInt64s) -> bool:
        """Whether each of these pieces lies in a range. Both uint64 [num_pieces]."""
        at = np.searchsorted(self._begins, begin, "right") - 1
        if not len(self._begins) or (at < 0).any():
            return not len(begin)
        return bool((begin + size <= self._ends[at]).all())
