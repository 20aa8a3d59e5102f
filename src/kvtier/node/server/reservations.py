"""Reservations of a partition: slots that engines are to fill, or are late to fill."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvtier.index.selection import Bools, Int64s

OVERDUE_S = 2.0
"""Age of a reservation at which nobody waits for its blocks any more. An engine reserves slots when
it schedules the step that computes the blocks; one that was stopped would hold up others for ever.
"""


class Reservation(NamedTuple):
    """Slots that an engine is to fill.

    since_s: time of the reservation. is_reserved: bool [num_slots], whether the engine still is to
    fill each slot of the partition. slots, generations: int64 bytes.
    """

    since_s: float
    is_reserved: Bools
    slots: bytes
    generations: bytes


class Reservations:
    """Reservations of all engines in one partition.

    generations: int64 [num_slots], of the partition's slots. clock: seconds.
    """

    def __init__(self, generations: Int64s, clock: Callable[[], float]) -> None:
        self._generations = generations
        self._clock = clock
        # By the first slot and its generation, which no other one has; oldest first.
        self._recent: OrderedDict[bytes, Reservation] = OrderedDict()
        self._is_overdue = np.zeros(len(generations), bool)
        self._num_overdue = 0

    def add(self, is_reserved: Bools, slots: bytes, generations: bytes) -> None:
        """Note that an engine is to fill slots; see ``Reservation``."""
        self.has_overdue()  # forgets old ones
        if slots:
            made = Reservation(self._clock(), is_reserved, slots, generations)
            self._recent[slots[:8] + generations[:8]] = made

    def has_overdue(self) -> bool:
        """Return whether an engine has not filled slots for ``OVERDUE_S``."""
        while self._recent:
            oldest = next(iter(self._recent.values()))
            if oldest.since_s > self._clock() - OVERDUE_S:
                break
            _, (_, is_reserved, numbers, generations) = self._recent.popitem(last=False)
            slots = np.frombuffer(numbers, np.int64)
            is_same = self._generations[slots] == np.frombuffer(generations, np.int64)
            late = slots[is_reserved[slots] & is_same]
            self._is_overdue[late] = True
            self._num_overdue += len(late)
        return bool(self._num_overdue)

    def are_overdue(self, slots: Int64s) -> Bools:
        """Return whether each slot is overdue: bool [n]. Call ``has_overdue`` before."""
        return self._is_overdue[slots]

    def end_whole(self, slots: bytes, generations: bytes) -> None:
        """Like ``end``, for slots that probably are all of one reservation, in its order."""
        first = slots[:8] + generations[:8]
        if (found := self._recent.get(first)) is not None and found.slots == slots:
            del self._recent[first]  # nothing of it is left to examine when it is old
        if self._num_overdue:
            self.end(np.frombuffer(slots, np.int64))

    def end(self, slots: Int64s) -> None:
        """Note that an engine has filled slots, or never will. slots: int64 [n], distinct."""
        if self._num_overdue:
            self._num_overdue -= int(np.count_nonzero(self._is_overdue[slots]))
            self._is_overdue[slots] = False
