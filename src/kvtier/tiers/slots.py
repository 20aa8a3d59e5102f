"""Free slots of a tier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.types import Slot


def check_slots(slots: Sequence[Slot], num_slots: int) -> None:
    """Raise ``ValueError`` where a slot is none of ``num_slots``: memory and files lie behind."""
    low, high = min(slots, default=0), max(slots, default=-1)
    if low < 0 or high >= num_slots:
        raise ValueError(
            f"slot {low if low < 0 else high} is none of the tier's {num_slots}; "
            "use slots that it gave out"
        )


def check_count(num_slots: int) -> None:
    """Raise ``ValueError`` where fewer than no slots are asked for."""
    if num_slots < 0:
        raise ValueError(f"{num_slots} slots can't be allocated; ask for 0 or more")


class SlotPool:
    """Hands out neighbouring slots where it can: a run of slots is one copy and one view of KV.

    A bit per slot; allocation looks for the first run that is long enough, else takes the lowest
    free slots. Slots from ``num_open`` on are closed: nobody gets them until ``open`` is called.
    """

    def __init__(self, num_slots: int, num_open: int | None = None) -> None:
        # A slot that is never free stands on either side, so that every run has two ends.
        self._bounded = np.zeros(num_slots + 2, bool)
        self._is_free = self._bounded[1:-1]
        self.num_open = self.num_free = 0
        self.open(num_slots if num_open is None else num_open)

    def open(self, num_slots: int) -> None:
        """The next ``num_slots`` slots may be given out from now on."""
        after = self.num_open + num_slots
        assert self.num_open <= after <= len(self._is_free), "more slots than the pool has"
        self._is_free[self.num_open : after] = True
        self.num_open = after
        self.num_free += num_slots

    @property
    def num_used(self) -> int:
        """Slots that were given out and not given back."""
        return self.num_open - self.num_free

    def allocate(self, num_slots: int) -> list[Slot] | None:
        """``num_slots`` free slots, ascending; None where there are not enough."""
        check_count(num_slots)
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
        check_slots(slots, self.num_open)
        assert not self._is_free[slots].any(), "a slot was freed twice"
        assert len(set(slots)) == len(slots), "a slot was freed twice in one call"
        self._is_free[slots] = True
        self.num_free += len(slots)
