"""Free slots of a tier."""

from __future__ import annotations

import numpy as np

from kvtier.types import Slot


class SlotPool:
    """Hands out neighbouring slots where it can: a run of slots is one copy and one view of KV.

    A bit per slot; allocation looks for the first run that is long enough, else takes the lowest
    free slots.
    """

    def __init__(self, num_slots: int) -> None:
        # A slot that is never free stands on either side, so that every run has two ends.
        self._bounded = np.zeros(num_slots + 2, bool)
        self._is_free = self._bounded[1:-1]
        self._is_free[:] = True
        self.num_free = num_slots

    def allocate(self, num_slots: int) -> list[Slot] | None:
        """``num_slots`` free slots, ascending; None where there are not enough."""
        if num_slots > self.num_free:
            return None
        if num_slots == 0:
            return []
        free = np.flatnonzero(self._is_free)
        last = num_slots - 1
        runs = np.flatnonzero(free[last:] - free[: len(free) - last] == last)
        start = int(runs[0]) if len(runs) else 0
        chosen = free[start : start + num_slots]
        self._is_free[chosen] = False
        self.num_free -= num_slots
        return [Slot(slot) for slot in chosen.tolist()]

    def longest_run(self) -> int:
        """Length of the longest run of free neighbours."""
        edges = np.flatnonzero(self._bounded[1:] != self._bounded[:-1])
        return int((edges[1::2] - edges[::2]).max(initial=0))

    def free(self, slots: list[Slot]) -> None:
        """Give slots back; each must be in use."""
        assert min(slots, default=0) >= 0, "a slot that was never given out"
        assert not self._is_free[slots].any(), "a slot was freed twice"
        assert len(set(slots)) == len(slots), "a slot was freed twice in one call"
        self._is_free[slots] = True
        self.num_free += len(slots)
