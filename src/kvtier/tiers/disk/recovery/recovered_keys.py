"""Recovered blocks of slabs: completeness and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.tiers.disk.format.records import RecordKind, same_keys
from kvtier.tiers.disk.format.rows import SlotRows
from kvtier.tiers.disk.slab import Slab
from kvtier.tiers.disk.slots import DiskSlots
from kvtier.tiers.storage import KeptKeys, Keys

LOOKED_UP: Final = 1 << 13
"""Number of slots to look up at a time; other lookups have to wait meanwhile."""
SLICE_SLOTS: Final = 1 << 16
"""Number of slots whose parts are compared at a time."""

Int64s = npt.NDArray[np.int64]


class SlabKeys(KeptKeys):
    """Keys of the slots in which a restart found blocks. Replaced blocks are left out."""

    def __init__(self, slab: Slab, slots: DiskSlots, can_load: bool) -> None:
        self._slab = slab
        self._states = slots
        self._slots = slots.to_drop if can_load else slots.to_drop[:0]
        self._first_number = slab.numbers.next

    @property
    def num_keys(self) -> int:
        return len(self._slots)

    def in_order(self, start: int, end: int) -> Keys:
        return self._of(self._slots[start:end].astype(np.int64))

    @property
    def num_places(self) -> int:
        return len(self._slab.table) if len(self._slots) else 0

    def at(self, start: int, end: int) -> Keys:
        return self._of(np.arange(start, min(end, self.num_places)))

    def _of(self, slots: Int64s) -> Keys:
        """Return the keys of slots, looked up in pieces, so that other lookups can run between."""
        ends = range(LOOKED_UP, len(slots), LOOKED_UP)
        return np.concatenate([self._some_of(part) for part in np.split(slots, ends)])

    def _some_of(self, slots: Int64s) -> Keys:
        records, _ = self._slab.look_up(slots)
        is_kept = (records["kind"] == RecordKind.PUT) & (records["seq"] < self._first_number)
        is_kept &= self._states.have_blocks(slots)  # drops the older of two slots with one key
        keys: Keys = np.ascontiguousarray(records["key"])[is_kept]
        return keys


def complete(tables: Sequence[SlotRows]) -> npt.NDArray[np.bool_]:
    """Return the slots in which every part holds the same block of the same write: bool [n].

    The records of all parts have the same sequence number then. tables: rows of each part's slots.
    """
    same: npt.NDArray[np.bool_] = tables[0].kinds == RecordKind.PUT
    for table in tables[1:]:
        same &= table.kinds == RecordKind.PUT
        for start in range(0, len(table), SLICE_SLOTS):
            part = slice(start, start + SLICE_SLOTS)
            same[part] &= same_keys(table.keys[part], tables[0].keys[part])
            same[part] &= table["seq"][part] == tables[0]["seq"][part]
    return same
