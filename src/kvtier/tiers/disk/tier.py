"""Disk tier: blocks by key, in the slots of a slab."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from threading import TIMEOUT_MAX, Lock

import numpy as np

from kvtier.core.errors import ConfigError, TierError
from kvtier.core.types import DISK, BlockKey, BlockName, Direct, Slot
from kvtier.devices.base import Finding, Memory
from kvtier.layout import KVGroup
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.disk.arrays import Int64s
from kvtier.tiers.disk.blocks import DiskBlocks
from kvtier.tiers.disk.direct import Pool
from kvtier.tiers.disk.format.records import as_keys
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.disk.sealing import make_sealing
from kvtier.tiers.disk.system import DiskSystem
from kvtier.tiers.pieces import HOST_KINDS, Pieces
from kvtier.tiers.storage import (
    KeptKeys,
    Outcome,
    ScrubReport,
    StorageFacts,
    StorageSite,
    StorageTier,
)

HOST_ONLY = frozenset({"host"})
NUM_KEYS_CHECKED = 16
"""Blocks of an earlier process that are read to tell whether their encryption key is known."""


def make_disk(site: StorageSite) -> DiskTier:
    """Make a further disk tier, for ``storage="name=disk:/path"``: encrypted if there are keys."""
    if not site.location:
        raise ConfigError(f'{site.name}: no folder; write it as "{site.name}=disk:/path"')
    key = site.coding.encryption_key
    options = DiskOptions(Path(site.location), site.capacity_bytes, encryption_key=key)
    return DiskTier(options, site.group, site.arena, name=site.name)


class DiskTier(StorageTier):
    """Storage tier on local disks. Its blocks are found again after a restart or a crash.

    A table maps keys to slots; the lock protects it. It also lists free slots that still hold a
    block. Slots are read and written without the lock. If a block is dropped while it is read, its
    slot becomes free when the last reader is done.

    For the arguments see ``DiskBlocks``.
    """

    facts = StorageFacts(reaches=HOST_KINDS, finds_at_once=True, wants_scrubbing=True)

    def __init__(
        self,
        options: DiskOptions,
        group: KVGroup,
        arena: Memory | None = None,
        system: DiskSystem | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        name: str = DISK,
        pool: Pool | None = None,
    ) -> None:
        self.name = name
        self.bytes_per_block = group.bytes_per_block
        self._sealing = make_sealing(options, group)
        if self._sealing is not None:
            arena = pool = None  # blocks pass through memory of the tier
        self.blocks = DiskBlocks(options, group, arena, system, clock, monotonic, pool)
        self.facts = replace(
            self.facts,
            reaches=HOST_ONLY if options.direct is Direct.OFF else HOST_KINDS | self.blocks.reached,
            # Checksums are computed on the CPU, so blocks in accelerator memory are not written.
            writes_from=HOST_ONLY if options.direct is Direct.OFF else HOST_KINDS,
            direct=Direct.OFF if self.blocks.pool_path.reason else options.direct,
        )
        self._lock = Lock()
        self._slots = self.blocks.listed
        self._is_kept = np.zeros(self.blocks.num_slots, bool)
        self._num_readers: Counter[int] = Counter()
        self._leaving: set[int] = set()
        try:
            self._check_key(options)
        except BaseException:
            self.abandon()
            raise

    def _check_key(self, options: DiskOptions) -> None:
        """Raise ``ConfigError`` if the blocks of an earlier process have other keys than ours."""
        if self._sealing is None:
            return
        kept = self.kept_keys().at(0, NUM_KEYS_CHECKED)
        keys = [BlockKey(each.tobytes()) for each in kept]
        held = [Slot(slot) for slot in self._slots_with(keys).tolist()] if keys else []

        def read(at: list[int], rows: Pieces) -> list[Outcome]:
            return self.blocks.load([keys[each] for each in at], [held[each] for each in at], rows)

        if (unknown := self._sealing.unknown_key(keys, read)) is not None:
            raise ConfigError(
                f"disk tier: the slab in {options.path} is encrypted with the key {unknown:08x}, "
                "which encryption_key does not give; add it behind the new one, or name another "
                "folder"
            )

    @property
    def num_blocks(self) -> int:
        return self.blocks.num_slots - self.blocks.slots.num_quarantined

    @property
    def has_unindexed(self) -> bool:
        return self.num_unindexed > 0

    @property
    def num_unindexed(self) -> int:
        """Number of recovered blocks of all namespaces that were not requested yet."""
        return self.blocks.slots.num_unclaimed

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory used for the slots."""
        return self.blocks.memory_bytes + self._is_kept.nbytes

    @property
    def breaker(self) -> BreakerState:
        return self.blocks.breaker

    def unindexed_keys(self) -> list[BlockKey]:
        return self.blocks.unclaimed_keys()

    def lasting_keys(self) -> list[BlockKey]:
        return self.blocks.lasting_keys()

    def kept_keys(self) -> KeptKeys:
        return self.blocks.kept_keys()

    # -- by key ------------------------------------------------------------------------------------

    def find(self, keys: Sequence[BlockKey], timeout_s: float = inf) -> list[Outcome]:
        if not self._lock_until(time.monotonic() + timeout_s):
            return [Outcome.FAILED] * len(keys)
        try:
            return self._find(keys)
        finally:
            self._lock.release()

    def num_known(self, keys: Sequence[BlockKey]) -> int | None:
        if not self._lock.acquire(blocking=False):
            return None
        try:
            wanted = as_keys(keys)
            is_right, _ = self.blocks.fit(wanted, self._slots.find(wanted))
        finally:
            self._lock.release()
        return int(np.logical_and.accumulate(is_right).sum())

    def _lock_until(self, ends_at: float) -> bool:
        """Take the lock; return False if another thread held it until ``ends_at``.

        ``drop`` with ``for_good`` holds it while it writes.
        """
        left_s = max(0.0, ends_at - time.monotonic())
        return self._lock.acquire(timeout=min(left_s, TIMEOUT_MAX))

    def _find(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        slots = self._hold(keys)
        return [Outcome.THERE if slot >= 0 else Outcome.ABSENT for slot in slots.tolist()]

    def _hold(self, keys: Sequence[BlockKey]) -> Int64s:
        """Claim blocks, and return their slots: int64 [n]; -1 for a missing block.

        The table may be outdated: a scrub empties slots of damaged blocks, and an unused slot may
        hold another block by now. So each slot is checked against its record.
        """
        wanted = as_keys(keys)
        slots = self._slots.find(wanted)
        is_right, is_other = self.blocks.fit(wanted, slots)
        if (lost := np.flatnonzero((slots >= 0) & ~is_right)).size:
            gone = lost[self._is_kept[slots[lost]] & ~is_other[lost]]
            self._leave(slots[gone])
            self._slots.remove(slots[lost])
        slots[~is_right | ~self.blocks.slots.hold(np.where(is_right, slots, -1))] = -1
        self._is_kept[slots[slots >= 0]] = True
        return slots

    def put(
        self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float = inf
    ) -> list[Outcome]:
        ends_at = time.monotonic() + timeout_s
        if not self.blocks.can_store or not self._lock_until(ends_at):
            return [Outcome.FAILED] * len(names)
        try:
            outcomes = self._find([name.key for name in names])
            new = [at for at, outcome in enumerate(outcomes) if outcome is not Outcome.THERE]
            # Evict nothing for a write that would miss its deadline.
            slots = self._allocate(len(new)) if time.monotonic() < ends_at else []
            fit = new[: len(slots)]
            before = self._slots_with([names[at].key for at in fit])
        finally:
            self._lock.release()
        # At most one slot may hold a block, or a block dropped for good could come back.
        others = [Slot(slot) for slot in before[before >= 0].tolist()]
        new_names = [names[at] for at in fit]
        stored = self._store(new_names, slots, blocks.pick(fit), ends_at, others)
        with self._lock:
            for at, slot, is_stored in zip(fit, slots, stored, strict=True):
                if is_stored:
                    self._slots.put(np.array([slot], np.int64))
                    self._is_kept[slot] = True
                    outcomes[at] = Outcome.THERE
                else:
                    self.blocks.free([slot])
        return [outcome if outcome is Outcome.THERE else Outcome.FAILED for outcome in outcomes]

    def _store(
        self,
        names: Sequence[BlockName],
        slots: Sequence[Slot],
        blocks: Pieces,
        ends_at: float,
        others: Sequence[Slot],
    ) -> list[bool]:
        """Write blocks, encrypted if there is a key. See ``DiskBlocks.store``."""
        if self._sealing is None:
            return self.blocks.store(names, slots, blocks, ends_at, others)

        def write(at: list[int], rows: Pieces) -> list[bool]:
            some = [names[each] for each in at]
            emptied = [] if at[0] else others
            return self.blocks.store(some, [slots[each] for each in at], rows, ends_at, emptied)

        return self._sealing.store([name.key for name in names], blocks, write)

    def _load(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], blocks: Pieces, ends_at: float
    ) -> list[Outcome]:
        """Read blocks, and decrypt them if there is a key. See ``DiskBlocks.load``."""
        if self._sealing is None:
            return self.blocks.load(keys, slots, blocks, ends_at)

        def read(at: list[int], rows: Pieces) -> list[Outcome]:
            some = [keys[each] for each in at]
            return self.blocks.load(some, [slots[each] for each in at], rows, ends_at)

        return self._sealing.load(keys, blocks, read)

    def _allocate(self, num_blocks: int) -> list[Slot]:
        """Allocate slots, fewer if there are too few. Unclaimed blocks are evicted for them."""
        return self.blocks.allocate(min(num_blocks, self.blocks.num_free)) or []

    def get(
        self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float = inf
    ) -> list[Outcome]:
        ends_at = time.monotonic() + timeout_s
        if not self._lock_until(ends_at):
            return [Outcome.FAILED] * len(keys)
        outcomes = [Outcome.ABSENT] * len(keys)
        try:
            at = np.flatnonzero((slots := self._hold(keys)) >= 0).tolist()
            self._num_readers.update(slots[at].tolist())
        finally:
            self._lock.release()
        held = [Slot(slot) for slot in slots[at].tolist()]
        results = self._load([keys[each] for each in at], held, blocks.pick(at), ends_at)
        with self._lock:
            self._end_read(held)
            for each, slot, result in zip(at, held, results, strict=True):
                outcomes[each] = result
                is_bad = self.blocks.slots.is_bad(slot)
                if is_bad or result in (Outcome.DAMAGED, Outcome.ABSENT):  # of another key
                    outcomes[each] = Outcome.DAMAGED if is_bad else result
                    self._forget([keys[each]], np.array([slot], np.int64))
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
            slots = self._hold(keys)
            if for_good:
                there = self._slots_with(keys)
                if not self.blocks.forget([Slot(slot) for slot in there[there >= 0].tolist()]):
                    raise TierError(self.name, "drop", "the journal can't be written")
                self._slots.remove(there[there >= 0])
            self._leave(slots[slots >= 0])

    def _slots_with(self, keys: Sequence[BlockKey]) -> Int64s:
        """Return the slot that holds each block, in use or not: int64 [n]; -1 for none."""
        wanted = as_keys(keys)
        slots = self._slots.find(wanted)
        slots[~self.blocks.fit(wanted, slots)[0]] = -1
        return slots

    def _forget(self, keys: Sequence[BlockKey], slots: Int64s) -> None:
        """Remove blocks from the table, and free their slots; skip those removed meanwhile."""
        wanted = as_keys(keys)
        still = self._slots.find(wanted) == slots
        self._slots.remove(slots[still])
        self._leave(slots[still])

    def _leave(self, slots: Int64s) -> None:
        """Free the slots, those that are being read after their last reader is done."""
        self._is_kept[slots] = False
        leaving = [Slot(slot) for slot in slots.tolist()]
        busy = {slot for slot in leaving if self._num_readers[slot]}
        self._leaving.update(busy)
        self.blocks.free([slot for slot in leaving if slot not in busy])

    # -- upkeep ------------------------------------------------------------------------------------

    def scrub(self, max_bytes: int) -> ScrubReport:
        return self.blocks.scrub(max_bytes)

    def findings(self) -> list[Finding]:
        return self.blocks.findings()

    def check_invariants(self) -> None:
        """Raise AssertionError if slots, keys and counts disagree.

        O(num_slots); no other call may run meanwhile.
        """
        self.blocks.check_invariants()
        num_kept = self.blocks.num_used + self.blocks.slots.num_unclaimed
        assert len(self._slots) >= num_kept, "a block without a key"
        assert self._is_kept.sum() == self.blocks.num_used, "a slot in use without a block"
        assert not self._leaving, "a slot waits for a reader that does not exist"

    def close(self) -> None:
        self.blocks.close()

    def abandon(self) -> None:
        """Release the files without a clean close, as the end of the process would."""
        self.blocks.abandon()
