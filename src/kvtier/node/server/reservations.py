"""Reservations of a partition: slots that engines are to fill, or are late to fill."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvtier.core.types import Slot
from kvtier.index.selection import Bools, Int64s, as_array

OVERDUE_S = 2.0
"""Age of a reservation at which nobody waits for its blocks any more. An engine reserves slots when
it schedules the step that computes the blocks; one that was stopped would hold up others for ever.
"""


class Reservation(NamedTuple):
    """Slots that an engine is to fill.

    since_s: time of the reservation. is_reserved: bool [num_slots], whether the engine still is to
    fill each slot of the partition. slots: of the reservation. generations: theirs, as int64 bytes.
    """

    since_s: float
    is_reserved: Bools
    slots: Sequence[Slot]
    generations: bytes


class Reservations:
    """Reservations of all engines in one partition.

    generations: int64 [num_slots], of the partition's slots. clock: seconds.
    """

    def __init__(self, generations: Int64s, clock: Callable[[], float]) -> None:
        self._generations = generations
        self._clock = clock
        self._recent: deque[Reservation] = deque()  # oldest first
        self._is_overdue = np.zeros(len(generations), bool)
        self._num_overdue = 0

    def add(self, is_reserved: Bools, slots: Sequence[Slot], generations: bytes) -> None:
        """Note that an engine is to fill slots; see ``Reservation``."""
        self.has_overdue()  # forgets old ones
        self._recent.append(Reservation(self._clock(), is_reserved, slots, generations))

    def has_overdue(self) -> bool:
        """Return whether an engine has not filled slots for ``OVERDUE_S``."""
        while self._recent and self._recent[0].since_s <= self._clock() - OVERDUE_S:
            _, is_reserved, numbers, generations = self._recent.popleft()
            slots = as_array(numbers)
            is_same = self._generations[slots] == np.frombuffer(generations, np.int64)
            late = slots[is_reserved[slots] & is_same]
            self._is_overdue[late] = True
            self._num_overdue += len(late)
        return bool(self._num_overdue)

    def are_overdue(self, slots: Int64s) -> Bools:
        """Return whether each slot is overdue: bool [n]. Call ``has_overdue`` before."""
        return self._is_overdue[slots]

    def end(self, slots: Int64s) -> None:
        """Note that an engine has filled slots, or never will. slots: int64 [n], distinct."""
        if self._num_overdue:
            self._num_overdue -= int(np.count_nonzero(self._is_overdue[slots]))
            self._is_overdue[slots] = False
