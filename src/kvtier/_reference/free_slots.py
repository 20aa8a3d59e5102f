"""Free slots of a tier, as a row of bits: twin of the native class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class FreeSlots:
    """``num_slots`` slots, of which none is free at first. Not safe to be used by several threads.

    ValueError for what is no slot, or more slots than there are; nothing is changed then.
    """

    def __init__(self, num_slots: int) -> None:
        if not 0 <= num_slots < 1 << 32:
            raise ValueError(f"num_slots: {num_slots} is not in 0 .. {(1 << 32) - 1}")
        # A slot that is never free stands on either side, so that every run has two ends.
        self._bounded = np.zeros(num_slots + 2, bool)
        self._is_free = self._bounded[1:-1]
        self._num_opened = 0
        self._num_free = 0

    def num_free(self) -> int:
        return self._num_free

    def longest_run(self) -> int:
        """Free neighbours, at most."""
        edges = np.flatnonzero(self._bounded[1:] != self._bounded[:-1])
        return int((edges[1::2] - edges[::2]).max(initial=0))

    def open(self, first: int, end: int) -> None:
        """Slots first .. end - 1 are free from now on; none from ``first`` on was opened before."""
        if not 0 <= end <= len(self._is_free):
            raise ValueError(f"end: {end} is not in 0 .. {len(self._is_free)}")
        if not 0 <= first <= end:
            raise ValueError(f"first: {first} is not in 0 .. {end}")
        if first < self._num_opened:
            raise ValueError(f"first: {first}; the slots up to {self._num_opened} are open")
        self._is_free[first:end] = True
        self._num_opened = end
        self._num_free += end - first

    def free(self, slots: Sequence[int]) -> None:
        """These are free again. AssertionError for one that is free already, or named twice."""
        for slot in slots:
            if not 0 <= slot < 1 << 32:
                raise ValueError(f"slot {slot} is not in 0 .. 2**32 - 1")
            if slot >= self._num_opened:
                raise ValueError(f"slot {slot} is none of the {self._num_opened} that are open")
        seen: set[int] = set()
        for slot in slots:
            if self._is_free[slot] or slot in seen:
                raise AssertionError(f"slot {slot} was freed twice")
            seen.add(slot)
        self._is_free[list(slots)] = True
        self._num_free += len(slots)

    def take(self, num_slots: int) -> list[int]:
        """Free slots, ascending: the first run that is long enough, else the lowest ones."""
        if not 0 <= num_slots <= self._num_free:
            raise ValueError(f"num_slots: {num_slots} is not in 0 .. {self._num_free}")
        if num_slots == 0:
            return []
        free = np.flatnonzero(self._is_free)
        last = num_slots - 1
        runs = np.flatnonzero(free[last:] - free[: len(free) - last] == last)
        start = int(runs[0]) if len(runs) else 0
        chosen = free[start : start + num_slots]
        self._is_free[chosen] = False
        self._num_free -= num_slots
        taken: list[int] = chosen.tolist()
        return taken
