"""Blocks in the slots of slabs: room, what a restart found, verified reads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import Finding, Memory
from kvtier.layout import KVGroup
from kvtier.tiers.disk.opening import wanted
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.disk.part import DiskPart, SlotOwner
from kvtier.tiers.disk.parts import complete, on_all
from kvtier.tiers.disk.records import Kind, Records, as_keys, same_keys
from kvtier.tiers.disk.replay import recovered
from kvtier.tiers.disk.slots import DiskSlots
from kvtier.tiers.disk.system import DiskSystem
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import Outcome, ScrubReport
from kvtier.types import BlockKey, BlockName, Slot

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class DiskBlocks(SlotOwner):
    """Slots for blocks on local disks; they are found again after a restart or a crash.

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
        a load ``DAMAGED`` or ``FAILED``. After too many errors in a row the tier is off.
        Opening raises ``ConfigError`` (see ``opening.open_slab``) or ``TierError``.
    """

    def __init__(
        self,
        options: DiskOptions,
        group: KVGroup,
        arena: Memory | None,
        system: DiskSystem | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.options = options
        self.bytes_per_block = group.bytes_per_block
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

    def found(self) -> tuple[Records, Int64s]:
        """Blocks that the slabs hold: their keys, V32 [n], and slots. Of two with one key the last
        one counts."""
        return np.ascontiguousarray(self._table["key"][self._found.slots]), self._found.slots

    def contents(self, slots: Sequence[Slot]) -> tuple[Records, Int64s]:
        """Keys of the blocks that lie in slots, whoever wants them; and these slots."""
        at = np.array(slots, np.int64)
        at = at[self._table["kind"][at] == Kind.PUT]
        return np.ascontiguousarray(self._table["key"][at]), at

    def fit(self, keys: Records, slots: Int64s) -> tuple[Bools, Bools]:
        """bool [n] each: which slots hold the block of that key, all of it, and which hold one of
        another key. -1 stands for no slot."""
        is_slot = slots >= 0
        is_right, is_other = is_slot.copy(), np.zeros(len(slots), bool)
        for part in self.parts:
            rows = part.slab.table[slots]
            is_put, is_same = rows["kind"] == Kind.PUT, same_keys(rows["key"], keys)
            is_right &= is_put & is_same
            is_other |= is_slot & is_put & ~is_same
        return is_right, is_other

    def hold(self, slots: Int64s) -> Bools:
        """bool [n]: which slots hold a block that is in use, by now: blocks that a restart found
        are claimed by that. -1 stands for no slot."""
        return self._slots.hold(slots)

    def is_quarantined(self, slot: Slot) -> bool:
        """Whether the slot had an I/O error."""
        return self._slots.is_bad(slot)

    def claim(self, keys: Sequence[BlockKey]) -> list[Slot]:
        """Slots of the longest leading run of ``keys`` that a restart found and nobody claimed.

        They are in use from now on, as if they had been allocated.
        """
        if not keys or not self.num_unclaimed or self.is_off:
            return []
        return self._slots.claim(self._found.find(as_keys(list(keys)), self._table))

    def forget(self, slots: Sequence[Slot]) -> None:
        """No restart finds the blocks of these slots. The slots stay as they are."""
        for part in self.parts:
            part.empty(np.array(slots, np.int64))

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
        self, names: Sequence[BlockName], slots: Sequence[Slot], blocks: Pieces
    ) -> list[bool]:
        """Write blocks. True: the block survives what ``options.durability`` says.

        A block that was not stored leaves its slot empty.
        """
        at = np.array(slots, np.int64)
        # All parts first: halves of two blocks must never look like one, wherever a crash comes.
        if self.is_off or not all(part.empty(at) for part in self.parts):
            return [False] * len(names)
        stored = on_all(
            self.parts, lambda rank, part: part.store(names, slots, self._of(rank, blocks))
        )
        everywhere = np.logical_and.reduce(stored)
        for part, here in zip(self.parts, stored, strict=True):
            part.empty(at[here & ~everywhere])
        return [bool(each) for each in everywhere]

    def load(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], blocks: Pieces
    ) -> list[Outcome]:
        """Read blocks to where ``blocks`` lie, and verify them."""
        if not keys:
            return []
        loaded = on_all(
            self.parts, lambda rank, part: part.load(keys, slots, self._of(rank, blocks))
        )
        right = np.logical_and.reduce([each for each, _ in loaded])
        failed = np.logical_or.reduce([each for _, each in loaded])
        return [
            Outcome.THERE if ok else Outcome.FAILED if bad else Outcome.DAMAGED
            for ok, bad in zip(right.tolist(), failed.tolist(), strict=True)
        ]

    def _of(self, rank: int, blocks: Pieces) -> Pieces:
        """The parts that ``rank`` has of blocks."""
        if len(self.parts) == 1:
            return blocks
        num_bytes = self.parts[rank].num_bytes
        return blocks.part(rank * num_bytes, num_bytes)

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
