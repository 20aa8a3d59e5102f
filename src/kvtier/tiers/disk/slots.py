"""Slots of a slab by state: free, in use, quarantined, or with an unclaimed recovered block."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from threading import Lock
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.types import Slot
from kvtier.tiers.disk.arrays import Bools, Int64s, Uint32s, Uint64s
from kvtier.tiers.disk.format.records import RecordKind
from kvtier.tiers.memory.slots import check_count, check_slots

FIRST_ROOM: Final = 1024


class SlotState(IntEnum):
    FREE = 0
    UNCLAIMED = 1
    USED = 2
    QUARANTINED = 3


class DiskSlots:
    """States of the slots of a slab. Thread-safe; no call costs O(num_slots).

    kinds: uint8 [num_slots], kind of the deciding record of each slot.
    found: int64 [n], slots with the blocks that a restart found.
    ages: uint64 [num_slots], age of each slot; the lowest one is evicted first.
    """

    def __init__(self, kinds: npt.NDArray[np.uint8], found: Int64s, ages: Uint64s) -> None:
        num_slots = len(kinds)
        self._lock = Lock()
        self._state = np.zeros(num_slots, np.uint8)
        self._state[kinds == RecordKind.BAD] = SlotState.QUARANTINED
        self._state[found] = SlotState.UNCLAIMED
        self._is_bad = self._state == SlotState.QUARANTINED
        free = np.flatnonzero(self._state == SlotState.FREE)
        self._free = _Stack(free[::-1])
        self.num_unclaimed = len(found)
        self.num_quarantined = int(self._is_bad.sum())
        self.num_used = 0
        self._to_drop: Uint32s = in_order(found, ages[found])
        self._num_passed = 0

    @property
    def num_bytes(self) -> int:
        """Approximate memory use in bytes."""
        arrays = (self._state, self._is_bad, self._to_drop)
        return self._free.num_bytes + sum(array.nbytes for array in arrays)

    @property
    def num_free(self) -> int:
        """Number of slots that can be allocated: free ones, and those of unclaimed blocks."""
        return len(self._free) + self.num_unclaimed

    def allocate(self, num_slots: int) -> list[Slot] | None:
        """Allocate free slots, then those of unclaimed blocks; None if there are too few."""
        check_count(num_slots)
        with self._lock:
            if num_slots > self.num_free:
                return None
            chosen = [self._free.take(min(num_slots, len(self._free)))]
            missing = num_slots - len(chosen[0])
            while missing:
                part = self._to_drop[self._num_passed : self._num_passed + missing].astype(np.int64)
                assert len(part), "the count of unclaimed blocks is wrong"
                self._num_passed += len(part)
                part = part[self._state[part] == SlotState.UNCLAIMED]
                self.num_unclaimed -= len(part)
                missing -= len(part)
                chosen.append(part)
            slots = np.concatenate(chosen)
            self._state[slots] = SlotState.USED
            self.num_used += num_slots
            return [Slot(slot) for slot in slots.tolist()]

    def free(self, slots: Sequence[Slot]) -> None:
        """Free slots; each must be in use. Those with an I/O error become quarantined."""
        check_slots(slots, len(self._state))
        with self._lock:
            back = np.array(slots, np.int64)
            assert (self._state[back] == SlotState.USED).all(), "a slot was freed twice"
            assert len(set(slots)) == len(slots), "a slot was freed twice in one call"
            self.num_used -= len(slots)
            bad = self._is_bad[back]
            self._state[back[bad]] = SlotState.QUARANTINED
            self._push(back[~bad])

    def _push(self, slots: Int64s) -> None:
        self._state[slots] = SlotState.FREE
        self._free.put(np.sort(slots)[::-1])

    def hold(self, slots: Int64s) -> Bools:
        """Claim unclaimed slots, and return which slots are in use now: bool [n].

        -1 stands for no slot. A slot appears at most once.
        """
        with self._lock:
            there = slots >= 0
            state = self._state[slots]
            unclaimed = slots[there & (state == SlotState.UNCLAIMED)]
            self._state[unclaimed] = SlotState.USED
            self.num_unclaimed -= len(unclaimed)
            self.num_used += len(unclaimed)
            is_used = (state == SlotState.USED) | (state == SlotState.UNCLAIMED)
            return np.asarray(there & is_used)

    def is_bad(self, slot: Slot) -> bool:
        """Return whether the slot can't be read or written."""
        return bool(self._is_bad[slot])

    def unclaimed(self) -> Int64s:
        """Return the slots of unclaimed blocks, in the order of eviction."""
        with self._lock:
            left = self._to_drop[self._num_passed :]
            left = left[self._state[left] == SlotState.UNCLAIMED]
            return np.asarray(left, np.int64)

    @property
    def to_drop(self) -> Uint32s:
        """Slots of unclaimed blocks in the order of eviction, and maybe some claimed ones.

        A view; it is never written to.
        """
        return self._to_drop[self._num_passed :]

    def have_blocks(self, slots: Int64s) -> Bools:
        """Return which slots are in use or unclaimed: bool [n]."""
        state = self._state[slots]
        return np.asarray((state == SlotState.USED) | (state == SlotState.UNCLAIMED))

    def drop_unclaimed(self, slots: Int64s) -> None:
        """Free those of the slots that hold an unclaimed block, because the block is damaged."""
        with self._lock:
            dropped = slots[self._state[slots] == SlotState.UNCLAIMED]
            self.num_unclaimed -= len(dropped)
            self._push(dropped)

    def quarantine(self, slots: Int64s) -> None:
        """Never allocate these slots again: they can't be read or written."""
        with self._lock:
            slots = slots[~self._is_bad[slots]]
            self._is_bad[slots] = True
            self.num_quarantined += len(slots)
            unclaimed = slots[self._state[slots] == SlotState.UNCLAIMED]
            self.num_unclaimed -= len(unclaimed)
            self._state[unclaimed] = SlotState.QUARANTINED
            is_free = self._state[slots] == SlotState.FREE
            if is_free.any():  # rare, so a pass over all free slots is acceptable
                self._state[slots[is_free]] = SlotState.QUARANTINED
                stack = self._free.all()
                self._free = _Stack(stack[self._state[stack] == SlotState.FREE])

    def check_invariants(self) -> None:
        """Raise AssertionError if the counts and the states disagree. O(num_slots)."""
        with self._lock:
            counts = np.bincount(self._state, minlength=4)
            stack = self._free.all()
            assert counts[SlotState.FREE] == len(stack), "free slots miscounted"
            assert len(np.unique(stack)) == len(stack), "a slot is free twice"
            assert (self._state[stack] == SlotState.FREE).all(), "a slot in use is free"
            assert counts[SlotState.USED] == self.num_used, "used slots miscounted"
            assert counts[SlotState.UNCLAIMED] == self.num_unclaimed, "unclaimed miscounted"
            assert self.num_quarantined == self._is_bad.sum(), "quarantined miscounted"
            left = self._to_drop[self._num_passed :]
            num_left = int((self._state[left] == SlotState.UNCLAIMED).sum())
            assert num_left == self.num_unclaimed, "an unclaimed block can't be dropped"


def in_order(slots: Int64s, ages: Uint64s) -> Uint32s:
    """Return slots sorted by age, and by number if equally old.

    Age and slot are packed into one 64-bit number if they fit: that sorts five times as fast as an
    argsort.
    """
    if not len(slots):
        return np.zeros(0, np.uint32)
    high, low = ages >> np.uint64(32), ages & np.uint64(0xFFFFFFFF)
    high -= high.min()
    low -= low.min()
    slot_bits, low_bits = int(slots.max()).bit_length(), int(low.max()).bit_length()
    if int(high.max()).bit_length() + low_bits + slot_bits > 64:
        return slots[np.argsort(ages, kind="stable")].astype(np.uint32)
    packed = (high << np.uint64(low_bits)) | low
    packed <<= np.uint64(slot_bits)
    packed |= slots.astype(np.uint64)
    packed.sort()
    packed &= np.uint64((1 << slot_bits) - 1)
    return packed.astype(np.uint32)


class _Stack:
    """Stack of slots, initially with the lowest one on top. It never shrinks its array."""

    def __init__(self, slots: Int64s) -> None:
        self._slots: Uint32s = slots.astype(np.uint32)
        self._num = len(slots)

    def __len__(self) -> int:
        return self._num

    @property
    def num_bytes(self) -> int:
        return self._slots.nbytes

    def all(self) -> Int64s:
        return self._slots[: self._num].astype(np.int64)

    def take(self, num: int) -> Int64s:
        """Pop ``num`` slots, the top one first."""
        rest = self._num - num
        taken = self._slots[rest : self._num][::-1].astype(np.int64)
        self._num = rest
        return taken

    def put(self, slots: Int64s) -> None:
        """Push slots; the last one is on top afterwards."""
        num = self._num + len(slots)
        if num > len(self._slots):
            larger = np.empty(max(num, 2 * len(self._slots), FIRST_ROOM), np.uint32)
            larger[: self._num] = self._slots[: self._num]
            self._slots = larger
        self._slots[self._num : num] = slots
        self._num = num
