"""Catalogue of the blocks known to this process, and the pack of each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.hot import KeyTable
from kvtier.core.types import BlockKey
from kvtier.tiers.remote.bucket.manifests import Pack, Tombstone
from kvtier.tiers.remote.bucket.packs import PackCoding, PackName
from kvtier.tiers.remote.envelope import as_keys
from kvtier.tiers.storage import Keys

Int64s = npt.NDArray[np.int64]

NO_ROW: Final = -1
MAX_TOMBSTONES: Final = 1 << 20
ADD_AT_ONCE: Final = 256
"""Packs added per lock: some thousand blocks, a few milliseconds, for which look-ups wait."""


@dataclass(frozen=True, slots=True, eq=False)
class PackLocation:
    """Blocks of a call that are in one pack.

    num_blocks: blocks in the pack.
    numbers: int64 [n], their positions in the call.
    at: int64 [n], their positions in the pack, ascending.
    coding: of the pack, if it is coded.
    """

    pack: PackName
    num_blocks: int
    numbers: Int64s
    at: Int64s
    coding: PackCoding | None = None


@dataclass(slots=True)
class _Row:
    """A pack with known blocks.

    num_known: how many of its blocks are known.
    num_deleted: how many were deleted by tombstones.
    """

    name: PackName
    stamp: int
    num_blocks: int
    num_known: int
    coding: PackCoding | None
    num_deleted: int = 0


class Catalogue:
    """At most ``num_blocks`` blocks; the oldest are replaced by new ones. Thread-safe.

    Blocks are in a ring, about in the order in which they became known, with 40 bytes each, and a
    table maps keys to places in the ring. Places below ``_num_used`` hold a block or are in
    ``_left``.
    """

    def __init__(self, num_blocks: int) -> None:
        self._capacity = num_blocks
        self._keys: Keys = np.empty(num_blocks, "V32")
        self._row_of = np.full(num_blocks, NO_ROW, np.int32)
        self._at = np.empty(num_blocks, np.uint16)
        self._num_used = 0
        self._left: list[int] = []
        self._next = 0
        self._table = KeyTable(np.empty(0, "V32"), np.empty(0, np.int64))
        self._rows: dict[int, _Row] = {}
        self._free_rows: list[int] = []
        self._tombstones: OrderedDict[BlockKey, int] = OrderedDict()
        self._newest = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._table)

    @property
    def num_packs(self) -> int:
        """Packs with at least one known block."""
        return len(self._rows)

    # -- queries -----------------------------------------------------------------------------------

    def places(self, keys: Keys, since: int = 0) -> list[PackLocation]:
        """Return the locations of blocks, one per pack, in the order of the call.

        Blocks that are unknown, or only in packs older than the stamp ``since``, are omitted.

        keys: V32 [n].
        """
        with self._lock:
            slots = self._slots(keys, since)
            there = np.flatnonzero(slots >= 0)
            rows = self._row_of[slots[there]]
            at = self._at[slots[there]].astype(np.int64)
            order = np.lexsort((at, rows))
            cuts = np.flatnonzero(np.diff(rows[order])) + 1
            found = []
            for some in np.split(order, cuts) if len(order) else ():
                pack = self._rows[int(rows[some[0]])]
                place = there[some], at[some]
                found.append(PackLocation(pack.name, pack.num_blocks, *place, pack.coding))
        return sorted(found, key=lambda place: int(place.numbers.min()))

    def have(self, keys: Sequence[BlockKey], since: int = 0) -> list[bool]:
        """Return whether each block is known in a pack that is not older than ``since``."""
        with self._lock:
            are_known: list[bool] = (self._slots(as_keys(keys), since) >= 0).tolist()
        return are_known

    def _slots(self, keys: Keys, since: int) -> Int64s:
        """Return int64 [n]: the place of each block in the ring; -1 for none."""
        slots = self._table.find(keys)
        self._pass_over_old(slots, since)
        return slots

    def _pass_over_old(self, slots: Int64s, since: int) -> None:
        """Set places of blocks in packs older than ``since`` to -1."""
        if since:
            there = np.flatnonzero(slots >= 0)
            rows, which = np.unique(self._row_of[slots[there]], return_inverse=True)
            are_old = np.array([self._rows[row].stamp < since for row in rows.tolist()], bool)
            slots[there[are_old[which]]] = -1

    # -- changes -----------------------------------------------------------------------------------

    def next_stamp(self, now: int) -> int:
        """Return a stamp that is newer than all known ones. now: the clock, ns."""
        with self._lock:
            self._newest = max(now, self._newest + 1)
            return self._newest

    def add(self, packs: Sequence[Pack], since: int = 0) -> None:
        """Add the blocks of packs.

        Blocks that are known already keep their location unless it is older than ``since``.
        """
        for at in range(0, len(packs), ADD_AT_ONCE):
            self._add(packs[at : at + ADD_AT_ONCE], since)

    def _add(self, packs: Sequence[Pack], since: int) -> None:
        keys = np.concatenate([pack.keys for pack in packs])
        lengths = np.array([len(pack.keys) for pack in packs])
        pack_of = np.repeat(np.arange(len(packs)), lengths)
        at = np.arange(len(keys)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        stamps = np.array([pack.stamp for pack in packs], np.uint64)[pack_of]
        with self._lock:
            self._newest = max(self._newest, *(pack.stamp for pack in packs))
            new = self._new_ones(keys, stamps, since)[-self._capacity :]
            if not len(new):
                return
            new_keys = np.take(keys, new)
            self._leave(self._table.find(new_keys))  # those in packs that are too old
            slots = self._make_room(len(new))
            rows = np.full(len(packs), NO_ROW, np.int32)
            some, nums = np.unique(pack_of[new], return_counts=True)
            for each, num in zip(some.tolist(), nums.tolist(), strict=True):
                rows[each] = self._new_row(packs[each], num)
            self._keys[slots] = new_keys
            self._row_of[slots] = rows[pack_of[new]]
            self._at[slots] = at[new]
            self._table.put(new_keys, slots)

    def _new_ones(self, keys: Keys, stamps: npt.NDArray[np.uint64], since: int) -> Int64s:
        """Return int64 [n]: positions of the keys that become known, each key once."""
        slots = self._table.find(keys)
        self._pass_over_old(slots, since)
        new = slots < 0
        last = {
            key: at
            for at, key in zip(np.flatnonzero(new).tolist(), _as_bytes(keys[new]), strict=True)
            if not self._tombstones or self._tombstones.get(BlockKey(key), -1) < int(stamps[at])
        }
        return np.array(sorted(last.values()), np.int64)

    def _new_row(self, pack: Pack, num_known: int) -> int:
        row = self._free_rows.pop() if self._free_rows else len(self._rows)
        num_blocks = len(pack.keys)
        self._rows[row] = _Row(pack.name, pack.stamp, num_blocks, num_known, pack.coding)
        return row

    def forget(self, keys: Sequence[BlockKey], pack: PackName | None = None) -> None:
        """Remove blocks that no longer exist. pack: only those in this pack."""
        with self._lock:
            slots = self._table.find(as_keys(keys))
            slots = slots[slots >= 0]
            if pack is not None:
                rows = [self._rows[each].name == pack for each in self._row_of[slots].tolist()]
                slots = slots[np.array(rows, bool)]
            self._leave(slots)

    def lose(self, key: BlockKey, pack: PackName) -> None:
        """Remove the blocks of a deleted pack that contained ``key``.

        If ``key`` has another location by now, the loss is noticed at a read of another of its
        blocks.
        """
        with self._lock:
            (slot,) = self._table.find(as_keys([key])).tolist()
            if slot >= 0 and self._rows[row := int(self._row_of[slot])].name == pack:
                self._leave(np.flatnonzero(self._row_of == row))

    def lose_packs(self, names: Collection[PackName], stamp: int) -> None:
        """Remove the blocks of deleted packs that are not newer than ``stamp``."""
        gone = set(names)
        with self._lock:
            rows = [at for at, row in self._rows.items() if row.stamp <= stamp and row.name in gone]
            if rows:
                self._leave(np.flatnonzero(np.isin(self._row_of, rows)))

    def apply_tombstones(self, tombstones: Sequence[Tombstone]) -> list[PackName]:
        """Remove blocks from packs that are not newer than their tombstones.

        Returns packs all of whose blocks are deleted.
        """
        with self._lock:
            for tombstone in tombstones:
                self._newest = max(self._newest, tombstone.stamp)
                self._tombstones[tombstone.key] = max(
                    tombstone.stamp, self._tombstones.get(tombstone.key, 0)
                )
                self._tombstones.move_to_end(tombstone.key)
            while len(self._tombstones) > MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)
            slots = self._table.find(as_keys([tombstone.key for tombstone in tombstones])).tolist()
            dead, empty = [], []
            for slot, tombstone in zip(slots, tombstones, strict=True):
                if slot < 0 or (row := self._rows[int(self._row_of[slot])]).stamp > tombstone.stamp:
                    continue
                row.num_deleted += 1
                dead.append(slot)
                if row.num_deleted == row.num_blocks:
                    empty.append(row.name)
            self._leave(np.array(dead, np.int64))
            return empty

    # -- ring --------------------------------------------------------------------------------------

    def _make_room(self, num: int) -> Int64s:
        """Return int64 [num]: free places, then unused ones, then those of the oldest blocks.

        The oldest blocks are removed.
        """
        left = [self._left.pop() for _ in range(min(num, len(self._left)))]
        never = range(self._num_used, min(self._capacity, self._num_used + num - len(left)))
        self._num_used += len(never)
        slots = np.array([*left, *never], np.int64)
        window = (self._next + np.arange(num)) % self._capacity
        oldest = window[~np.isin(window, slots)][: num - len(slots)]
        if len(oldest):
            self._next = int((oldest[-1] + 1) % self._capacity)
            self._leave(oldest)
            del self._left[-len(oldest) :]
        return np.concatenate([slots, oldest])

    def _leave(self, slots: Int64s) -> None:
        """Remove the blocks in these places, which must be in use; negative places are ignored."""
        slots = np.unique(slots[slots >= 0])
        if not len(slots):
            return
        self._table.remove(np.take(self._keys, slots), slots)
        rows, nums = np.unique(self._row_of[slots], return_counts=True)
        self._row_of[slots] = NO_ROW
        self._left += slots.tolist()
        for row, num in zip(rows.tolist(), nums.tolist(), strict=True):
            self._rows[row].num_known -= num
            if not self._rows[row].num_known:
                del self._rows[row]
                self._free_rows.append(row)

    def check_invariants(self) -> None:
        """Raise AssertionError if the structures are inconsistent."""
        with self._lock:
            used = np.flatnonzero(self._row_of != NO_ROW)
            assert len(self._table) == len(used) <= self._capacity, "a block in no place, or in two"
            found = self._table.find(np.take(self._keys, used))
            assert (found == used).all(), "the table and the ring disagree"
            left = set(self._left)
            assert len(left) == len(self._left) == self._num_used - len(used), "places were lost"
            assert not left & set(used.tolist()), "a place is used and left"
            rows, nums = np.unique(self._row_of[used], return_counts=True)
            counted = dict(zip(rows.tolist(), nums.tolist(), strict=True))
            known = {at: row.num_known for at, row in self._rows.items()}
            assert counted == known, "blocks of packs were counted wrongly"
            assert len({*known, *self._free_rows}) == len(known) + len(self._free_rows), (
                "a row is used and free"
            )


def _as_bytes(keys: Keys) -> list[bytes]:
    whole = keys.tobytes()
    return [whole[at : at + 32] for at in range(0, len(whole), 32)]
