"""Python equivalent of the native ``FreeSlots``: free slots of a tier as a bit array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def free_rows(
    slots: Sequence[int], generations: npt.NDArray[np.int64], users: npt.NDArray[np.uint64]
) -> tuple[int, int]:
    """Give slots the generations of free ones, which are even, and no users.

    Raises ValueError for no slots, and for one without a row.

    Args:
        slots: the slots, distinct.
        generations: int64 [num_slots].
        users: uint64 [num_slots].

    Returns:
        The lowest and the highest of the slots.
    """
    freed = np.asarray(slots, np.int64)
    if not len(freed):
        raise ValueError("slots: there is none")
    if freed.max() >= min(len(generations), len(users)):
        raise ValueError(f"slot {freed.max()} has no row")
    generations[freed] = (generations[freed] | 1) + 1
    users[freed] = 0
    return int(freed.min()), int(freed.max())


class FreeSlots:
    """Set of free slots among ``num_slots``, initially empty. Not thread-safe.

    Methods raise ValueError for invalid slots, or more slots than exist, without any change.
    """

    def __init__(self, num_slots: int) -> None:
        if not 0 <= num_slots < 1 << 32:
            raise ValueError(f"num_slots: {num_slots} is not in 0 .. {(1 << 32) - 1}")
        # A sentinel that is never free on either side, so that every run has two ends.
        self._bounded = np.zeros(num_slots + 2, bool)
        self._is_free = self._bounded[1:-1]
        self._num_opened = 0
        self._num_free = 0

    def num_free(self) -> int:
        return self._num_free

    def longest_run(self) -> int:
        """Return the length of the longest run of free neighbouring slots."""
        edges = np.flatnonzero(self._bounded[1:] != self._bounded[:-1])
        return int((edges[1::2] - edges[::2]).max(initial=0))

    def open(self, first: int, end: int) -> None:
        """Open slots first .. end - 1 as free. No slot from ``first`` on may be open already."""
        if not 0 <= end <= len(self._is_free):
            raise ValueError(f"end: {end} is not in 0 .. {len(self._is_free)}")
        if not 0 <= first <= end:
            raise ValueError(f"first: {first} is not in 0 .. {end}")
        if first < self._num_opened:
            raise ValueError(f"first: {first}; the slots up to {self._num_opened} are open")
        self._is_free[first:end] = True
        self._num_opened = end
        self._num_free += end - first

    def free(self, slots: Sequence[int], first: int = 0) -> None:
        """Free slots. Raise AssertionError for a slot that is free already, or given twice.

        first: number of the first slot, as ``slots`` counts them.
        """
        for slot in slots:
            if not 0 <= slot < 1 << 32:
                raise ValueError(f"slot {slot} is not in 0 .. 2**32 - 1")
            if not first <= slot < first + self._num_opened:
                raise ValueError(f"slot {slot} is none of the {self._num_opened} that are open")
        slots = [slot - first for slot in slots]
        seen: set[int] = set()
        for slot in slots:
            if self._is_free[slot] or slot in seen:
                raise AssertionError(f"slot {slot} was freed twice")
            seen.add(slot)
        self._is_free[list(slots)] = True
        self._num_free += len(slots)

    def take(self, num_slots: int) -> list[int]:
        """Take free slots, ascending: the first run that is long enough, else the lowest ones."""
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
