"""Slot allocator of a tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from kvtier.core.types import Slot


def check_slots(slots: Sequence[Slot], num_slots: int) -> None:
    """Raise ``ValueError`` if a slot is out of range: slots become addresses and file offsets."""
    if isinstance(slots, (list, tuple)) or not slots:
        low, high = min(slots, default=0), max(slots, default=-1)
    else:  # faster than one Python object per slot
        places = np.asarray(slots, np.int64)
        low, high = int(places.min()), int(places.max())
    if low < 0 or high >= num_slots:
        raise ValueError(
            f"slot {low if low < 0 else high} is none of the tier's {num_slots}; "
            "use slots that it gave out"
        )


def check_count(num_slots: int) -> None:
    """Raise ``ValueError`` if the requested number of slots is negative."""
    if num_slots < 0:
        raise ValueError(f"{num_slots} slots can't be allocated; ask for 0 or more")


class SlotPool:
    """Allocator that prefers neighbouring slots: a run of slots is one copy and one view of KV.

    It takes the first run that is long enough, else the lowest free slots. Slots from ``num_open``
    on are closed: they are not allocated until ``open`` is called.
    """

    def __init__(self, num_slots: int, num_open: int | None = None) -> None:
        # Imported here, so that ``kvtier doctor`` can report why the native core can't be used.
        from kvtier.core.hot import FreeSlots

        self._num_slots = num_slots
        self._free = FreeSlots(num_slots)
        self.num_open = 0
        self.open(num_slots if num_open is None else num_open)

    def open(self, num_slots: int) -> None:
        """Open the next ``num_slots`` slots for allocation."""
        after = self.num_open + num_slots
        assert self.num_open <= after <= self._num_slots, "more slots than the pool has"
        self._free.open(self.num_open, after)
        self.num_open = after

    @property
    def num_free(self) -> int:
        return self._free.num_free()

    @property
    def num_used(self) -> int:
        """Number of slots that are allocated and not freed."""
        return self.num_open - self.num_free

    def allocate(self, num_slots: int) -> Sequence[Slot] | None:
        """Return ``num_slots`` free slots, ascending; None if there are too few."""
        check_count(num_slots)
        if num_slots > self.num_free:
            return None
        return cast("Sequence[Slot]", self._free.take(num_slots))

    def longest_run(self) -> int:
        """Return the length of the longest run of free neighbouring slots."""
        return self._free.longest_run()

    def free(self, slots: Sequence[Slot]) -> None:
        """Free slots; each must be allocated."""
        self._free.free(slots)
