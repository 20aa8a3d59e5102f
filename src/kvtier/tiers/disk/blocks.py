"""Blocks in the slots of slabs: allocation, recovery after a restart, verified reads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import inf
from threading import Thread
from typing import Final, TypeVar

import numpy as np

from kvtier.core.hot import SlotTable
from kvtier.core.types import BlockKey, BlockName, Slot
from kvtier.devices.base import Finding, Memory
from kvtier.layout import KVGroup
from kvtier.tiers.base import SlotAllocator
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.disk.arrays import Bools, Int64s
from kvtier.tiers.disk.direct import Pool, PoolPath
from kvtier.tiers.disk.format.membership import leave
from kvtier.tiers.disk.format.records import KEY_BYTES, RecordKind, Records, as_words, same_keys
from kvtier.tiers.disk.format.rows import SlotRows
from kvtier.tiers.disk.health import DiskHealth
from kvtier.tiers.disk.opening import open_slabs, wanted
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.disk.part import DiskPart
from kvtier.tiers.disk.recovery import complete, newest
from kvtier.tiers.disk.slab import Slab
from kvtier.tiers.disk.slots import DiskSlots
from kvtier.tiers.disk.system import DiskSystem
from kvtier.tiers.memory.slots import check_slots
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import KeptKeys, Keys, Outcome, ScrubReport

logger = logging.getLogger(__name__)

LOOKED_UP: Final = 1 << 13
"""Number of slots to look up at a time; other lookups have to wait meanwhile."""

Part = TypeVar("Part")
Result = TypeVar("Result")


class DiskBlocks(SlotAllocator):
    """Slots for blocks on local disks. Blocks are found again after a restart or a crash.

    Args:
        options: settings. With ``more_paths`` a block is cut into equal parts, one per slab; it
            exists only if all of its parts do.
        group: shape of the blocks.
        arena: memory that most blocks are written from and read into; it is registered with the I/O
            engine. Other addresses work, too.
        system: calls to the operating system; for tests.
        clock: unix time; for tests.
        monotonic: monotonic clock in seconds; for tests.
        pool: the engine's KV pool, if blocks may go directly to it and from it.

    The caller guarantees
        one thread stores, one loads, one scrubs; they may run concurrently. One thread calls
        ``allocate``, ``free`` and ``forget``. A slot that is stored to or loaded from is allocated
        or claimed, and is not freed meanwhile. A slot is never stored to and loaded from at once.
    Outcomes and errors
        after construction no method raises for errors of the disk: a store returns False, a load
        ``DAMAGED`` or ``FAILED``. After too many errors in a row the disk is not used for a while;
        reads and writes are judged separately, so a disk that can't be written can still be read.
        The constructor raises ``ConfigError`` (see ``opening.open_slabs``) or ``TierError``.
    """

    def __init__(
        self,
        options: DiskOptions,
        group: KVGroup,
        arena: Memory | None,
        system: DiskSystem | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        pool: Pool | None = None,
    ) -> None:
        self.options = options
        self.bytes_per_block = group.bytes_per_block
        self._pool, self._arena = pool, arena
        self._is_closed = False
        began = time.monotonic()
        self.parts: list[DiskPart] = []
        with ExitStack() as undo:
            system, each_part = system or DiskSystem(), options.each_part()
            slabs = open_slabs(
                [(each.path, wanted(each, group, options.num_paths)) for each in each_part],
                system,
                clock,
            )
            for slab in slabs:
                undo.callback(slab.close, clean=False)
            tables = [slab.table for slab in slabs]
            is_complete = complete(tables) if len(tables) > 1 else None
            self._find_blocks(slabs, is_complete)
            for rank, (each, slab) in enumerate(zip(each_part, slabs, strict=True)):
                size = slab.superblock.block_bytes
                here = pool and (pool.part(rank * size, size) if len(slabs) > 1 else pool)
                part = DiskPart(each, slab, arena, system, monotonic, self.slots, here)
                undo.callback(part.close)
                self.parts.append(part)
            if is_complete is not None:
                self._empty_all_but(is_complete)
            if len(self._replaced):  # or they would be found once the newer ones are dropped
                for part in self.parts:
                    part.empty(self._replaced)
            undo.pop_all()
        self.num_slots = len(self._rows)
        self._slot_bytes = sum(part.slot_bytes for part in self.parts)
        for part in self.parts[1:]:
            self.slots.quarantine(np.flatnonzero(part.slab.table.kinds == RecordKind.BAD))
        logger.info(
            "disk tier opened paths=%s slots=%d recovered=%d seconds=%.3f",
            [str(part.options.path) for part in self.parts],
            self.num_slots,
            self.slots.num_unclaimed,
            time.monotonic() - began,
        )
        if pool is not None:
            line = self._describe_path(pool)
            level = logging.WARNING if self.pool_path.is_compatible else logging.INFO
            logger.log(level, "disk to device way=%s: %s", line.found, line.note)

    # -- room --------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return self.slots.num_free

    @property
    def num_used(self) -> int:
        """Number of slots that are allocated or claimed, and not freed."""
        return self.slots.num_used

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory used for the slots."""
        tables = sum(part.slab.memory_bytes for part in self.parts)
        return tables + self.slots.num_bytes + self.listed.num_bytes()

    @property
    def pool_path(self) -> PoolPath:
        """Path of blocks to the pool; direct only if every disk reads directly into it."""
        paths = [part.pool_path for part in self.parts]
        return next((path for path in paths if path.reason or path.is_compatible), paths[0])

    @property
    def reached(self) -> frozenset[str]:
        """Kinds of memory, besides host memory, that every disk can read into."""
        far = [part.accelerator for part in self.parts]
        kinds = frozenset(each.kind for each in far if each is not None)
        return frozenset() if None in far else kinds

    @property
    def can_load(self) -> bool:
        """Whether loads are possible now; otherwise all would fail immediately."""
        return all(part.reads.breaker.is_passable for part in self.parts)

    @property
    def can_store(self) -> bool:
        """Whether stores are possible now: no disk's breaker refuses them."""
        return all(part.writes.breaker.is_passable for part in self.parts)

    @property
    def breaker(self) -> BreakerState:
        """Worst state of all disks, for reads and writes."""
        if any(part.is_short() for part in self.parts):
            return BreakerState.CUT_SHORT
        healths = [health for part in self.parts for health in (part.reads, part.writes)]
        return max(health.breaker.state for health in healths)

    def allocate(self, num_slots: int) -> list[Slot] | None:
        """Allocate slots: free ones first, then those of unclaimed blocks, oldest first.

        Unclaimed blocks that lose their slot are removed from ``listed``.
        """
        slots = self.slots.allocate(num_slots)
        if slots:
            self.listed.remove(np.array(slots, np.int64))
        return slots

    def free(self, slots: Sequence[Slot]) -> None:
        """Free slots. Until a slot is reused, a restart finds its block."""
        self.slots.free(slots)

    def unclaimed_keys(self) -> list[BlockKey]:
        """Return the keys of recovered blocks that are unclaimed, in the order of eviction.

        For an owner that keeps its own index, and claims them all.
        """
        return _as_list(self._rows.keys[self.slots.unclaimed()]) if self.can_load else []

    def lasting_keys(self) -> list[BlockKey]:
        """Return the keys of the blocks that a restart would find, also in free slots."""
        return _as_list(self._rows.keys[self._rows.kinds == RecordKind.PUT])

    def kept_keys(self) -> KeptKeys:
        """Return the keys of unclaimed blocks, in ranges of arrays."""
        return SlabKeys(self.parts[0].slab, self.slots, self.can_load)

    def fit(self, keys: Records, slots: Int64s) -> tuple[Bools, Bools]:
        """Return which slots hold the whole block of their key, and which hold another block.

        Both are bool [n]. -1 stands for no slot.
        """
        is_slot = slots >= 0
        is_right, is_other = is_slot.copy(), np.zeros(len(slots), bool)
        for part in self.parts:
            rows, _ = part.slab.look_up(slots)
            is_put, is_same = rows["kind"] == RecordKind.PUT, same_keys(rows["key"], keys)
            is_right &= is_put & is_same
            is_other |= is_slot & is_put & ~is_same
        return is_right, is_other

    def forget(self, slots: Sequence[Slot]) -> bool:
        """Make sure that no restart finds the blocks of these slots. The slots stay allocated.

        Return False if the journal can't be written; a restart may then find some of the blocks.
        """
        check_slots(slots, self.num_slots)
        at = np.array(slots, np.int64)
        return all(part.empty(at) for part in self.parts)

    def _find_blocks(self, slabs: Sequence[Slab], is_complete: Bools | None) -> None:
        """List the blocks that the slabs have kept.

        A crash may leave only some parts of a block. Such a block does not exist.
        """
        self._rows: SlotRows = slabs[0].table
        kinds = self._rows.kinds
        self._replaced = np.zeros(0, np.int64)
        if is_complete is not None:
            is_half = (kinds == RecordKind.PUT) & ~is_complete
            kinds = np.where(is_half, np.uint8(RecordKind.DEL), kinds)
        slots = np.flatnonzero(kinds == RecordKind.PUT)
        self.listed = SlotTable(self._rows.keys, slots)
        if len(self.listed) < len(slots):  # a key twice, after a crash
            older = slots
            keys = as_words(self._rows.keys[older])
            slots = np.sort(older[newest(keys, self._rows.seqs(older))])
            self._replaced = np.setdiff1d(older, slots)
            self.listed = SlotTable(self._rows.keys, slots)
        ages = [slab.take_ages() for slab in slabs]
        self.slots = DiskSlots(kinds, slots, ages[0])

    def _empty_all_but(self, is_complete: Bools) -> None:
        for part in self.parts:
            alone = np.flatnonzero((part.slab.table.kinds == RecordKind.PUT) & ~is_complete)
            if len(alone):
                part.empty(alone)  # if that can't be written, the next owner does it
                logger.warning(
                    "incomplete blocks dropped path=%s num=%d",
                    part.options.path,
                    len(alone),
                )

    # -- blocks ------------------------------------------------------------------------------------

    def store(
        self,
        names: Sequence[BlockName],
        slots: Sequence[Slot],
        blocks: Pieces,
        ends_at: float = inf,
        others: Sequence[Slot] = (),
    ) -> list[bool]:
        """Write blocks.

        Args:
            names: names of the blocks.
            slots: slot of each block.
            blocks: locations of the blocks in memory.
            ends_at: deadline of the caller (``monotonic``); that of the options may be earlier.
            others: further slots to mark as empty before the blocks are written.

        Returns:
            Per block: True if it survives the failures that ``options.durability`` names. If False,
            its slot is empty.
        """
        check_slots(slots, self.num_slots)
        if not names:
            return [False] * len(names)
        at = np.array(slots, np.int64)
        empty = np.array([*slots, *others], np.int64)
        is_ready = _enter([part.writes for part in self.parts])
        # All parts first: after a crash, parts of two blocks must never look like one block.
        if not is_ready or not all(part.mend() and part.empty(empty) for part in self.parts):
            return [False] * len(names)
        # One number for all parts of a block, so that parts of two writes differ, too.
        numbers = self.parts[0].slab.numbers.take(len(names))
        stored = on_all(
            self.parts,
            lambda rank, part: part.store(names, slots, self._of(rank, blocks), numbers, ends_at),
        )
        everywhere = np.logical_and.reduce(stored)
        for part, here in zip(self.parts, stored, strict=True):
            part.empty(at[here & ~everywhere])
        return [bool(each) for each in everywhere]

    def load(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[Slot],
        blocks: Pieces,
        ends_at: float = inf,
    ) -> list[Outcome]:
        """Read blocks into ``blocks``, and verify them. ends_at: see ``store``."""
        if not keys:
            return []
        check_slots(slots, self.num_slots)
        is_over = time.monotonic() >= ends_at
        if is_over or not _enter([part.reads for part in self.parts]):
            return [Outcome.FAILED] * len(keys)
        loaded = on_all(
            self.parts, lambda rank, part: part.load(keys, slots, self._of(rank, blocks), ends_at)
        )
        right = np.logical_and.reduce([each for each, _ in loaded])
        failed = np.logical_or.reduce([each for _, each in loaded])
        return [
            Outcome.THERE if ok else Outcome.FAILED if bad else Outcome.DAMAGED
            for ok, bad in zip(right.tolist(), failed.tolist(), strict=True)
        ]

    def _of(self, rank: int, blocks: Pieces) -> Pieces:
        """Return the parts of blocks that belong to ``rank``."""
        if len(self.parts) == 1:
            return blocks
        num_bytes = self.parts[rank].num_bytes
        return blocks.part(rank * num_bytes, num_bytes)

    # -- upkeep ------------------------------------------------------------------------------------

    def scrub(self, max_bytes: int) -> ScrubReport:
        """Verify the next blocks, about ``max_bytes`` of them, whether they are in use or not.

        A damaged block is dropped, unless it was rewritten meanwhile.
        """
        if not _enter([part.reads for part in self.parts]):
            return ScrubReport()
        share = max_bytes // len(self.parts)
        return ScrubReport.sum([part.scrub(share) for part in self.parts])

    def findings(self) -> list[Finding]:
        room = f"{self.num_slots} blocks, {self.num_slots * self._slot_bytes / 2**30:.2f} GiB"
        not_now = [
            (f"not {done}", f"{part.options.path} is not {done}: {state}")
            for part in self.parts
            for done, health in (("read", part.reads), ("written", part.writes))
            if (state := health.state())
        ]
        words = dict.fromkeys(word for word, _ in not_now)
        return [
            Finding("disk tier", ", ".join([room, *words]), "; ".join(why for _, why in not_now)),
            *(line for part in self.parts for line in part.findings()),
            *([] if self._pool is None else [self._describe_path(self._pool)]),
            Finding("disk durability", self.options.durability.value),
            Finding("disk verify", self.options.verify.value),
            Finding("disk quarantined", str(self.slots.num_quarantined)),
        ]

    def _describe_path(self, pool: Pool) -> Finding:
        has_host = self._arena is not None and self._arena.address != pool.memory.address
        return self.pool_path.finding(self.options.direct, pool, has_host)

    def check_invariants(self) -> None:
        """Raise AssertionError if counts disagree. O(num_slots); no other call may run."""
        self.slots.check_invariants()

    def close(self) -> None:
        """Sync everything, and release the slabs for their next owner."""
        # A disk that does not answer is not waited for.
        healths = [health for part in self.parts for health in (part.reads, part.writes)]
        self._close(is_clean=not any(health.breaker.is_open for health in healths))

    def abandon(self) -> None:
        """Release the files without a clean close, as the end of the process would."""
        self._close(is_clean=False)

    def _close(self, is_clean: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with ExitStack() as last:
            for part in self.parts:
                last.callback(part.slab.close, clean=False)
            for part in self.parts:
                part.close()
            if is_clean:
                leave([part.slab for part in self.parts])


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


def _as_list(keys: Records) -> list[BlockKey]:
    joined = keys.tobytes()
    return [BlockKey(joined[at : at + KEY_BYTES]) for at in range(0, len(joined), KEY_BYTES)]


def _enter(healths: Sequence[DiskHealth]) -> bool:
    """Return whether all of them allow a call. If one refuses, no trial call is used up."""
    breakers = [health.breaker for health in healths]
    return all(breaker.is_passable for breaker in breakers) and all(
        breaker.enter() for breaker in breakers
    )


def on_all(parts: Sequence[Part], work: Callable[[int, Part], Result]) -> list[Result]:
    """Run ``work(rank, part)`` for all parts in parallel, and return the results.

    If a call raises, the first error is raised here after all calls have ended.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, parts[rank])
        except BaseException as error:  # raised again by the caller's thread
            errors.append(error)

    # Daemon threads: a hung disk must not keep the process from ending.
    others = [Thread(target=run, args=(rank,), daemon=True) for rank in range(1, len(parts))]
    for thread in others:
        thread.start()
    run(0)
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(len(parts))]
