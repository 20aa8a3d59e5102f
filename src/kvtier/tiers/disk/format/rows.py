"""Table of slots in memory: 49 bytes each, of the 64 of a journal record."""

from __future__ import annotations

from typing import Final, cast

import numpy as np
import numpy.typing as npt

from kvtier.tiers import pages
from kvtier.tiers.disk.format.records import RECORD, RECORD_VERSION, RecordKind, Records, are_live

ROW: Final = np.dtype([("key", "V32"), ("seq", "<u8"), ("crc", "<u4"), ("data_crc", "<u4")])
"""One row is three quarters of a cache line: all of it costs one miss."""

HUGE_FROM_BYTES: Final = 8 << 20

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class SlotRows:
    """Deciding record of each slot, without depth, time and namespace, which only the journal has.

    Not thread-safe.

    The key of a slot changes only when another block comes: a record that empties a slot leaves it.
    """

    def __init__(self, num_slots: int) -> None:
        self.kinds: npt.NDArray[np.uint8] = np.zeros(num_slots, np.uint8)
        self._rows = cast("Records", zeros(num_slots, ROW))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, field: str) -> npt.NDArray[np.generic]:
        """One field of all slots: ``kind``, or one of ``ROW``'s. A view."""
        return self.kinds if field == "kind" else self._rows[field]

    @property
    def keys(self) -> Records:
        """V32 [num_slots], ``ROW.itemsize`` bytes apart: a view."""
        return self._rows["key"]

    @property
    def num_bytes(self) -> int:
        return self._rows.nbytes + self.kinds.nbytes

    def of(self, slots: Int64s) -> Records:
        """Copies, as records with 0 for what is not known here."""
        rows = np.take(_whole(self._rows), slots).view(ROW)
        records = np.zeros(len(slots), RECORD)
        for name in ROW.names or ():
            records[name] = rows[name]
        records["slot"] = slots
        records["kind"] = self.kinds[slots]
        records["version"] = RECORD_VERSION
        return records

    def seqs(self, slots: Int64s) -> npt.NDArray[np.uint64]:
        """Sequence numbers of the slots' records."""
        return np.asarray(self._rows["seq"][slots], np.uint64)

    def decide(self, records: Records) -> Bools:
        """Bool [n]: which records are those that decide about their slots, all of which exist."""
        slots = records["slot"].astype(np.int64)
        rows = np.take(_whole(self._rows), slots).view(ROW)
        same = (rows["seq"] == records["seq"]) & (rows["crc"] == records["crc"])
        return np.asarray(same & (self.kinds[slots] == records["kind"]))

    def set(self, records: Records) -> None:
        """These records decide from now on; of several for one slot the last one."""
        slots = records["slot"].astype(np.int64)
        rows = np.empty(len(records), ROW)
        for name in ROW.names or ():
            rows[name] = records[name]
        is_empty = records["kind"] != RecordKind.PUT
        if is_empty.any():
            rows["key"][is_empty] = self._rows["key"][slots[is_empty]]
        # A third of the time of an assignment by slots.
        np.put(_whole(self._rows), slots, _whole(rows))
        np.put(self.kinds, slots, records["kind"])

    def num_live(self) -> int:
        """Slots with a record that has to be kept. O(num_slots)."""
        return int(np.count_nonzero(are_live(self.kinds)))


def zeros(num: int, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """As NumPy's, in huge pages where the system has them.

    A restart writes all of it, here and there, and with small pages most of its time would go into
    their faults.
    """
    num_bytes = num * np.dtype(dtype).itemsize
    if num_bytes < HUGE_FROM_BYTES:
        return np.zeros(num, dtype)
    return np.frombuffer(pages.anonymous(num_bytes), dtype, num)


def _whole(rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Rows without their fields: they are copied a good deal faster."""
    return rows.view(f"V{ROW.itemsize}")
