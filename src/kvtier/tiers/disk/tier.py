"""The disk tier: blocks in slabs, verified when they are read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import Finding, Memory
from kvtier.layout import KVGroup
from kvtier.tiers.base import Addresses, LoadResult, ScrubReport, StorageTier
from kvtier.tiers.disk.budget import WriteBudget
from kvtier.tiers.disk.opening import wanted
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.disk.part import DiskPart, SlotOwner
from kvtier.tiers.disk.parts import complete, on_all
from kvtier.tiers.disk.records import Kind, as_keys
from kvtier.tiers.disk.replay import recovered
from kvtier.tiers.disk.slots import DiskSlots
from kvtier.tiers.disk.system import DiskSystem
from kvtier.tiers.slots import check_slots
from kvtier.types import DISK, BlockKey, BlockName, Slot

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]


class DiskTier(StorageTier, SlotOwner):
    """Room for blocks on local disks; they are found again after a restart or a crash.

    options: with ``more_paths`` a block is cut into equal parts, one for each slab. It is there
    when all of its parts are.
    arena: memory that blocks mostly come from and go to; it is registered with the I/O engine.
    Any other address works as well. system, clock: for tests.

    The caller guarantees
        one thread stores, one loads, one scrubs, at the same time if they like; allocate, free,
        claim and forget belong to one thread. A slot that is stored to or loaded from is allocated
        or claimed, and is not freed meanwhile; a slot is never stored to and loaded from at once.
    Outcomes and errors
        no method raises for what the disk does after the tier was opened: a store answers False,
        a load ``CORRUPT`` or ``FAILED``. After too many errors in a row the tier is off.
        Opening raises ``ConfigError`` (see ``opening.open_slab``) or ``TierError``.
    """

    def __init__(
        self,
        options: DiskOptions,
        group: KVGroup,
        arena: Memory,
        system: DiskSystem | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = DISK
        self.options = options
        self.bytes_per_block = group.bytes_per_block
        self._budget = WriteBudget(options.bytes_per_day)
        self._is_closed = False
        began = time.monotonic()
        self.parts: list[DiskPart] = []
        with ExitStack() as undo:
            for each in options.each_part():
                want = wanted(each, group, options.num_paths)
                part = DiskPart(each, want, arena, system or DiskSystem(), clock, self)
                undo.callback(part.abandon)
                self.parts.append(part)
            self._forget_incomplete()
            self._table = self.parts[0].slab.table
            self._found = recovered(self._table)
            self._slots = DiskSlots(self._table, self._found)
            undo.pop_all()
        self.num_slots = len(self._table)
        self._slot_bytes = sum(part.slot_bytes for part in self.parts)
        for part in self.parts[1:]:
            self.quarantine(np.flatnonzero(part.slab.table["kind"] == Kind.BAD))
        logger.info(
            "disk tier opened paths=%s slots=%d recovered=%d seconds=%.3f",
            [str(part.options.path) for part in self.parts],
            self.num_slots,
            self.num_unclaimed,
            time.monotonic() - began,
        )

    # -- room --------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return 0 if self.is_off else self._slots.num_free

    @property
    def num_used(self) -> int:
        """Slots that were given out or claimed, and not given back."""
        return self._slots.num_used

    @property
    def num_unclaimed(self) -> int:
        """Blocks that a restart found and nobody has claimed yet; they count as free."""
        return self._slots.num_unclaimed

    @property
    def num_quarantined(self) -> int:
        """Slots that had an I/O error; they are not given out again."""
        return self._slots.num_quarantined

    @property
    def is_off(self) -> bool:
        """Too many errors in a row in some part: nothing is stored or loaded any more."""
        return any(part.is_off for part in self.parts)

    def allocate(self, num_slots: int) -> list[Slot] | None:
        """That many slots: free ones, then those of unclaimed blocks, the oldest first."""
        return self._slots.allocate(num_slots) if num_slots <= self.num_free else None

    def free(self, slots: list[Slot]) -> None:
        """Give slots back. Until a slot is used again, a restart finds its block."""
        self._slots.free(slots)

    def unclaimed_keys(self) -> list[BlockKey]:
        """Blocks that a restart found and nobody claimed; those that would leave first in front.

        For an owner that keeps an index of its own, and claims them all.
        """
        if self.is_off:
            return []
        return [BlockKey(self._table[slot]["key"].tobytes()) for slot in self._slots.unclaimed()]

    def claim(self, keys: Sequence[BlockKey]) -> list[Slot]:
        """Slots of the longest leading run of ``keys`` that a restart found and nobody claimed.

        They are in use from now on, as if they had been allocated.
        """
        if not keys or not self.num_unclaimed or self.is_off:
            return []
        return self._slots.claim(self._found.find(as_keys(list(keys)), self._table))

    def forget(self, slots: Sequence[Slot]) -> None:
        """No restart finds the blocks of these slots. The slots stay as they are."""
        check_slots(slots, self.num_slots)
        for part in self.parts:
            part.empty(np.array(slots, np.int64))

    def num_welcome(self, num_blocks: int) -> int:
        """All of them, or none: when the day's writes are used up, or the tier is off."""
        is_welcome = not self.is_off and self._budget.take(num_blocks * self._slot_bytes)
        return num_blocks if is_welcome else 0

    def quarantine(self, slots: Int64s) -> None:
        self._slots.quarantine(slots)

    def drop(self, slots: Int64s) -> None:
        self._slots.drop_unclaimed(slots)

    def _forget_incomplete(self) -> None:
        """A crash may leave some parts of a block: then it is not there."""
        tables = [part.slab.table for part in self.parts]
        if len(tables) == 1:
            return
        is_complete = complete(tables)
        for part, table in zip(self.parts, tables, strict=True):
            part.empty(np.flatnonzero((table["kind"] == Kind.PUT) & ~is_complete))

    # -- blocks ------------------------------------------------------------------------------------

    def store(
        self, names: Sequence[BlockName], slots: Sequence[Slot], addresses: Addresses
    ) -> list[bool]:
        """Write blocks. True: the block survives what ``options.durability`` says.

        A block that was not stored leaves its slot empty.
        """
        check_slots(slots, self.num_slots)
        at = np.array(slots, np.int64)
        # All parts first: halves of two blocks must never look like one, wherever a crash comes.
        if self.is_off or not all(part.empty(at) for part in self.parts):
            return [False] * len(names)
        stored = on_all(
            self.parts, lambda rank, part: part.store(names, slots, self._at(addresses, rank))
        )
        everywhere = np.logical_and.reduce(stored)
        for part, here in zip(self.parts, stored, strict=True):
            part.empty(at[here & ~everywhere])
        return [bool(each) for each in everywhere]

    def load(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], addresses: Addresses
    ) -> list[LoadResult]:
        """Read blocks to ``addresses``, ``bytes_per_block`` bytes each, and verify them."""
        if not keys:
            return []
        check_slots(slots, self.num_slots)
        loaded = on_all(
            self.parts, lambda rank, part: part.load(keys, slots, self._at(addresses, rank))
        )
        right = np.logical_and.reduce([each for each, _ in loaded])
        failed = np.logical_or.reduce([each for _, each in loaded])
        return [
            LoadResult.OK if ok else LoadResult.FAILED if bad else LoadResult.CORRUPT
            for ok, bad in zip(right.tolist(), failed.tolist(), strict=True)
        ]

    def _at(self, addresses: Addresses, rank: int) -> Addresses:
        """Where the parts of ``rank`` begin in blocks at ``addresses``."""
        return addresses + np.uint64(rank * self.parts[rank].num_bytes)

    # -- upkeep ------------------------------------------------------------------------------------

    def scrub(self, max_bytes: int) -> ScrubReport:
        """Verify the next blocks, about ``max_bytes`` of them, whether anybody uses them or not.

        A damaged block is forgotten; one that was rewritten meanwhile is not judged.
        """
        share = max_bytes // len(self.parts)
        return ScrubReport.sum([part.scrub(share) for part in self.parts])

    def findings(self) -> list[Finding]:
        room = f"{self.num_slots} blocks, {self.num_slots * self._slot_bytes / 2**30:.2f} GiB"
        reason = next((part.off_reason for part in self.parts if part.is_off), "")
        return [
            Finding("disk tier", f"{room}, off" if reason else room, reason),
            *(line for part in self.parts for line in part.findings()),
            Finding("disk durability", self.options.durability.value),
            Finding("disk verify", self.options.verify.value),
            Finding("disk quarantined", str(self.num_quarantined)),
        ]

    def check_invariants(self) -> None:
        """Raise AssertionError where counts disagree. O(num_slots); nothing else may run."""
        self._slots.check_invariants()

    def close(self) -> None:
        """Everything on the medium, and the slabs free for their next owner."""
        if not self._is_closed:
            self._is_closed = True
            for part in self.parts:
                part.close()

    def abandon(self) -> None:
        """Give the files back as they are, as the end of the process would."""
        if not self._is_closed:
            self._is_closed = True
            for part in self.parts:
                part.abandon()
