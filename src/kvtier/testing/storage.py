"""A storage tier in a dictionary, with gates and faults: for tests of what is above it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from threading import Event

from kvtier.devices import Finding
from kvtier.layout import KVGroup
from kvtier.tiers import Addresses, LoadResult, ScrubReport, StorageTier
from kvtier.tiers.slots import SlotPool
from kvtier.types import DISK, BlockKey, BlockName, Slot


class Shelf:
    """What outlives the tier: the bytes of blocks by key, oldest first."""

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, bytes] = {}


class MemoryStorage(StorageTier):
    """``num_slots`` blocks on a shelf; another tier over the same shelf finds them unclaimed.

    open_reads, open_writes: gates, open at first; ``clear`` holds the next call. spoiled: keys that
    come back ``CORRUPT``. refused: keys that can't be stored. num_written: blocks, in all.
    reads: the keys of each load that has begun; is_reading: there was one. scrubs: how many bytes
    each scrub was to look at.
    """

    def __init__(self, group: KVGroup, num_slots: int, shelf: Shelf) -> None:
        self.name = DISK
        self.num_slots = num_slots
        self.bytes_per_block = group.bytes_per_block
        self.open_reads, self.open_writes, self.is_reading = Event(), Event(), Event()
        self.open_reads.set()
        self.open_writes.set()
        self.spoiled: set[BlockKey] = set()
        self.refused: set[BlockKey] = set()
        self.num_written = 0
        self.reads: list[list[BlockKey]] = []
        self.scrubs: list[int] = []
        self.closed = False
        self._shelf = shelf
        self._slots = SlotPool(num_slots)
        self._keys: dict[Slot, BlockKey] = {}
        self._unclaimed: dict[BlockKey, Slot] = {}
        for key in list(shelf.blocks)[num_slots:]:
            del shelf.blocks[key]
        for key in shelf.blocks:
            (slot,) = self._slots.allocate(1) or []
            self._unclaimed[key] = slot
            self._keys[slot] = key

    @property
    def num_free(self) -> int:
        return self._slots.num_free + len(self._unclaimed)

    @property
    def num_unclaimed(self) -> int:
        return len(self._unclaimed)

    def allocate(self, num_slots: int) -> list[Slot] | None:
        if num_slots > self.num_free:
            return None
        while num_slots > self._slots.num_free:
            key = next(iter(self._unclaimed))
            self._slots.free([self._unclaimed.pop(key)])
        return self._slots.allocate(num_slots)

    def free(self, slots: list[Slot]) -> None:
        self._slots.free(slots)

    def claim(self, keys: Sequence[BlockKey]) -> list[Slot]:
        slots: list[Slot] = []
        for key in keys:
            if key not in self._unclaimed:
                break
            slots.append(self._unclaimed.pop(key))
        return slots

    def store(
        self, names: Sequence[BlockName], slots: Sequence[Slot], addresses: Addresses
    ) -> list[bool]:
        self.open_writes.wait()
        for name, slot, address in zip(names, slots, addresses, strict=True):
            old = self._keys.pop(slot, None)
            if old is not None and old not in self._keys.values():
                self._shelf.blocks.pop(old, None)
            if name.key not in self.refused:
                content = ctypes.string_at(int(address), self.bytes_per_block)
                self._shelf.blocks[name.key] = content
                self._keys[slot] = name.key
                self.num_written += 1
        return [name.key not in self.refused for name in names]

    def load(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], addresses: Addresses
    ) -> list[LoadResult]:
        self.reads.append(list(keys))
        self.is_reading.set()
        self.open_reads.wait()
        results = []
        for key, slot, address in zip(keys, slots, addresses, strict=True):
            is_right = self._keys.get(slot) == key and key not in self.spoiled
            if is_right:
                ctypes.memmove(int(address), self._shelf.blocks[key], self.bytes_per_block)
            results.append(LoadResult.OK if is_right else LoadResult.CORRUPT)
        return results

    def scrub(self, max_bytes: int) -> ScrubReport:
        """Looks at everything."""
        self.scrubs.append(max_bytes)
        keys = dict(self._keys)
        spoiled = tuple(slot for slot, key in keys.items() if key in self.spoiled)
        return ScrubReport(len(keys), len(keys) * self.bytes_per_block, spoiled, ())

    def findings(self) -> list[Finding]:
        return [Finding("disk tier", f"{self.num_slots} blocks in a dictionary")]

    def close(self) -> None:
        """The shelf stays."""
        self.closed = True
