"""From the journal back to what every slot holds, as a few operations on whole arrays."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.tiers.disk.records import (
    RECORD,
    RECORD_BYTES,
    Kind,
    Records,
    are_valid,
    as_words,
    key_prefixes,
    pick,
)

SLAB_ID_BYTES = 16
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What a journal says.

    table: ``RECORD`` [num_slots], the record that decides about each slot; kind 0 where none does.
    namespaces: digest by number. num_records: valid ones; num_invalid: wrong checksum or version.
    num_beyond: of slots that the slab does not have. generation, slab_id: None without a header.
    """

    table: Records
    namespaces: dict[int, bytes]
    next_seq: int
    num_records: int
    num_invalid: int
    num_beyond: int
    generation: int | None
    slab_id: bytes | None


def read_journal(fd: int) -> tuple[Records, int]:
    """All whole records of the file, and its size in bytes. A partial one at the end is left."""
    size = os.fstat(fd).st_size
    records = np.empty(size // RECORD_BYTES, RECORD)
    view = memoryview(records.view(np.uint8).data)
    done = 0
    while done < len(view) and (got := os.preadv(fd, [view[done:]], done)):
        done += got
    return records[: done // RECORD_BYTES], size


def replay(records: Records, num_slots: int) -> Replay:
    """What the journal says about ``num_slots`` slots. Any bytes may be in ``records``."""
    num_all = len(records)
    valid = are_valid(records)
    if not valid.all():
        records = pick(records, np.flatnonzero(valid))
    kind = np.ascontiguousarray(records["kind"])
    headers = records[:1][kind[:1] == Kind.HEADER]
    named = pick(records, np.flatnonzero(kind == Kind.NAMESPACE))
    about_slot = (kind == Kind.PUT) | (kind == Kind.DEL) | (kind == Kind.BAD)
    slot = records["slot"].astype(np.int64)
    seq = np.where(kind == Kind.HEADER, 0, records["seq"])
    known = about_slot & (slot < num_slots)

    at = np.flatnonzero(known)
    if (np.diff(seq[at].view(np.int64)) < 0).any():
        at = at[np.argsort(seq[at], kind="stable")]
    decides = np.full(num_slots, -1, np.int64)
    decides[slot[at]] = at  # of several records of a slot the last one stays
    taken = np.flatnonzero(decides >= 0)
    table = pick(records, decides[taken])
    if len(taken) < num_slots:
        rows, table = table, np.zeros(num_slots, RECORD)
        table.view("<u8").reshape(num_slots, 8)[taken] = rows.view("<u8").reshape(-1, 8)
    return Replay(
        table=table,
        namespaces={int(each["namespace"]): each["key"].tobytes() for each in named},
        next_seq=int(seq.max(initial=0)) + 1,
        num_records=len(records),
        num_invalid=num_all - len(records),
        num_beyond=int((about_slot & ~known).sum()),
        generation=int(headers[0]["seq"]) if len(headers) else None,
        slab_id=headers[0]["key"].tobytes()[:SLAB_ID_BYTES] if len(headers) else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """Blocks that a restart found, by key: sorted by the first 8 bytes, compared in full.

    prefixes: uint64 [n], ascending. slots: int64 [n]; the slot of each.
    """

    prefixes: npt.NDArray[np.uint64]
    slots: Int64s

    def find(self, keys: Records, table: Records) -> list[int]:
        """Slot of each key, -1 where it was not found. table: the records by slot."""
        wanted = as_words(keys)
        low = np.searchsorted(self.prefixes, wanted[:, 0], "left")
        high = np.searchsorted(self.prefixes, wanted[:, 0], "right")
        found = []
        for key, first, end in zip(keys, low.tolist(), high.tolist(), strict=True):
            # One candidate, but for two keys that agree in 8 bytes.
            same = (int(slot) for slot in self.slots[first:end] if table[slot]["key"] == key)
            found.append(next(same, -1))
        return found


def recovered(table: Records) -> Recovered:
    """The blocks of a table. Of two slots with one key the higher sequence number counts."""
    slots = np.flatnonzero(table["kind"] == Kind.PUT)
    live = table if len(slots) == len(table) else pick(table, slots)
    prefixes = key_prefixes(live)
    order = np.argsort(prefixes)
    if (prefixes[order[1:]] == prefixes[order[:-1]]).any():
        words = as_words(live["key"])
        order = np.lexsort((live["seq"], *(words[:, column] for column in (3, 2, 1, 0))))
        is_last = np.ones(len(order), bool)
        is_last[:-1] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
        order = order[is_last]
    return Recovered(prefixes[order], slots[order])
