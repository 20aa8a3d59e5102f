"""The disk tier: blocks by key, in the slots of a slab."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np
import numpy.typing as npt

from kvtier._hot import KeyTable
from kvtier.devices.base import Finding, Memory
from kvtier.layout import KVGroup
from kvtier.tiers.disk.blocks import DiskBlocks
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.disk.records import as_keys
from kvtier.tiers.disk.system import DiskSystem
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import Outcome, ScrubReport, StorageFacts, StorageTier
from kvtier.types import DISK, BlockKey, BlockName, Slot

Int64s = npt.NDArray[np.int64]


class DiskTier(StorageTier):
    """Blocks on local disks; they are found again after a restart or a crash.

    Which slot a block is in is known here only: in a table that is right whenever the lock is free.
    A slot is read and written outside of it; one whose block is dropped meanwhile is free when the
    last reader has gone. For the arguments see ``DiskBlocks``.
    """

    facts = StorageFacts(
        reaches=frozenset({"host", "cpu"}), finds_at_once=True, wants_scrubbing=True
    )

    def __init__(
        self,
        options: DiskOptions,
        group: KVGroup,
        arena: Memory | None = None,
        system: DiskSystem | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = DISK
        self.bytes_per_block = group.bytes_per_block
        self.blocks = DiskBlocks(options, group, arena, system, clock)
        self._lock = Lock()
        self._slots = KeyTable(*self.blocks.found())
        self._num_readers: Counter[int] = Counter()
        self._leaving: set[int] = set()

    @property
    def num_blocks(self) -> int:
        return self.blocks.num_slots - self.blocks.num_quarantined

    @property
    def has_unfound(self) -> bool:
        return self.num_unfound > 0

    @property
    def num_unfound(self) -> int:
        """Blocks that a restart found and nobody has asked for, of whatever namespace."""
        return self.blocks.num_unclaimed

    def unfound_keys(self) -> list[BlockKey]:
        """Blocks that a restart found and nobody has asked for; those that would leave first in
        front. For an owner that takes them all."""
        return self.blocks.unclaimed_keys()

    # -- by key ------------------------------------------------------------------------------------

    def find(self, keys: Sequence[BlockKey], timeout_s: float = 0.0) -> list[Outcome]:
        with self._lock:
            return self._find(keys)

    def _find(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        if self.blocks.is_off:
            return [Outcome.ABSENT] * len(keys)
        slots = self._slots.find(as_keys(list(keys)))
        is_there = self.blocks.hold(slots)
        return [Outcome.THERE if each else Outcome.ABSENT for each in is_there.tolist()]

    def put(
        self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float = 0.0
    ) -> list[Outcome]:
        with self._lock:
            outcomes = self._find([name.key for name in names])
            new = [at for at, outcome in enumerate(outcomes) if outcome is not Outcome.THERE]
            slots = self._allocate(len(new))
        fit = new[: len(slots)]
        stored = self.blocks.store([names[at] for at in fit], slots, blocks.pick(fit))
        with self._lock:
            for at, slot, is_stored in zip(fit, slots, stored, strict=True):
                if is_stored:
                    self._slots.put(as_keys([names[at].key]), np.array([slot], np.int64))
                    outcomes[at] = Outcome.THERE
                else:
                    self.blocks.free([slot])
        return [each if each is Outcome.THERE else Outcome.FAILED for each in outcomes]

    def _allocate(self, num_blocks: int) -> list[Slot]:
        """Slots, as many as there are. Blocks that nobody asked for go for them."""
        slots = self.blocks.allocate(min(num_blocks, self.blocks.num_free)) or []
        self._slots.remove(*self.blocks.contents(slots))
        return slots

    def get(
        self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float = 0.0
    ) -> list[Outcome]:
        outcomes = [Outcome.ABSENT] * len(keys)
        with self._lock:
            is_there = self.blocks.hold(slots := self._slots.find(as_keys(list(keys))))
            at = np.flatnonzero(is_there).tolist()
            self._num_readers.update(slots[at].tolist())
        held = [Slot(slot) for slot in slots[at].tolist()]
        results = self.blocks.load([keys[each] for each in at], held, blocks.pick(at))
        with self._lock:
            self._end_read(held)
            for each, slot, result in zip(at, held, results, strict=True):
                outcomes[each] = result
                if result is Outcome.DAMAGED or self.blocks.is_quarantined(slot):
                    outcomes[each] = Outcome.DAMAGED
                    self._forget([keys[each]], [slot])
        return outcomes

    def _end_read(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._num_readers[slot] -= 1
            if not self._num_readers[slot]:
                del self._num_readers[slot]
                if slot in self._leaving:
                    self._leaving.discard(slot)
                    self.blocks.free([slot])

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        with self._lock:
            slots = self._slots.find(as_keys(list(keys)))
            at = np.flatnonzero(self.blocks.hold(slots)).tolist()
            gone = [Slot(slot) for slot in slots[at].tolist()]
            if for_good:
                self.blocks.forget(gone)
            self._forget([keys[each] for each in at], gone)

    def _forget(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """The slots are free, or will be when nobody reads them any more."""
        self._slots.remove(as_keys(list(keys)), np.array(slots, np.int64))
        busy = [slot for slot in slots if self._num_readers[slot]]
        self._leaving.update(busy)
        self.blocks.free([slot for slot in slots if slot not in busy])

    # -- upkeep ------------------------------------------------------------------------------------

    def scrub(self, max_bytes: int) -> ScrubReport:
        return self.blocks.scrub(max_bytes)

    def findings(self) -> list[Finding]:
        return self.blocks.findings()

    def check_invariants(self) -> None:
        """Raise AssertionError where slots, keys and counts disagree. O(num_slots); nothing else
        may run."""
        self.blocks.check_invariants()
        num_kept = self.blocks.num_used + self.blocks.num_unclaimed
        assert len(self._slots) == num_kept, "a block without a key, or a key without a block"
        assert not self._leaving, "a slot waits for a reader that is not there"

    def close(self) -> None:
        self.blocks.close()

    def abandon(self) -> None:
        """Give the files back as they are, as the end of the process would."""
        self.blocks.abandon()
