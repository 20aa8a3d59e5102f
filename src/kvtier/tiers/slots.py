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
        self._is_free = np.ones(num_slots, bool)
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
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False, append=False))
        return int((edges[1::2] - edges[::2]).max(initial=0))

    def free(self, slots: list[Slot]) -> None:
        """Give slots back; each must be in use."""
        assert min(slots, default=0) >= 0, "a slot that was never given out"
        assert not self._is_free[slots].any(), "a slot was freed twice"
        assert len(set(slots)) == len(slots), "a slot was freed twice in one call"
        self._is_free[slots] = True
        self.num_free += len(slots)
