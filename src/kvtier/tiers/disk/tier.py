"""The disk tier: blocks in a slab, verified when they are read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvtier._hot import crc32c_many
from kvtier.devices.base import Finding, Memory
from kvtier.layout import KVGroup
from kvtier.tiers.base import Addresses, LoadResult, StorageTier
from kvtier.tiers.disk.bounce import BlockPort, Bounce
from kvtier.tiers.disk.budget import WriteBudget
from kvtier.tiers.disk.health import MEDIUM_ERRORS, Health
from kvtier.tiers.disk.io import IoEngine
from kvtier.tiers.disk.opening import open_slab, wanted
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.disk.records import Kind, Records, as_keys, same_keys
from kvtier.tiers.disk.replay import recovered
from kvtier.tiers.disk.scrub import RoundRobin, ScrubReport, check_blocks
from kvtier.tiers.disk.slots import DiskSlots
from kvtier.tiers.disk.system import DiskSystem
from kvtier.types import DISK, BlockKey, BlockName, Durability, IoKind, Slot, Verify

logger = logging.getLogger(__name__)

SCRUB_BUFFER_BYTES = 4 << 20

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


class DiskTier(StorageTier):
    """Room for blocks on a local disk; they are found again after a restart or a crash.

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
        system = system or DiskSystem()
        began = time.monotonic()
        self._slab = open_slab(options.path, wanted(options, group), system, clock)
        self.num_slots = self._slab.superblock.num_slots
        self.bytes_per_block = self._slab.superblock.block_bytes
        self._slot_bytes = self._slab.superblock.slot_bytes
        self._found = recovered(self._slab.table)
        self._slots = DiskSlots(self._slab.table, self._found)
        self._health = Health(str(options.path), options.errors_until_off)
        self._num_loads = 0
        self._budget = WriteBudget(options.bytes_per_day)
        self._is_closed = False
        self._round = RoundRobin()
        self._system = system
        self._engines: list[IoEngine] = []
        self._scrubber: tuple[IoEngine, Bounce] | None = None
        try:
            self._writer, self._reader = self._open_ports(arena)
        except BaseException:
            for engine in self._engines:
                engine.close()
            self._slab.close(clean=False)
            raise
        logger.info(
            "disk tier opened path=%s slots=%d recovered=%d seconds=%.3f",
            options.path,
            self.num_slots,
            self.num_unclaimed,
            time.monotonic() - began,
        )

    def _open_ports(self, arena: Memory) -> list[BlockPort]:
        """One engine, which a writer and a reader may use at once, and a buffer for each."""
        num_slots = self.options.bounce_bytes // self._slot_bytes
        bounces = [Bounce(num_slots, self._slot_bytes) for _ in range(2)]
        # Registered memory stays resident: not for buffers that are hardly needed.
        are_needed = self.bytes_per_block != self._slot_bytes
        buffers = [arena, *(each.memory for each in bounces if are_needed)]
        engine = self._open_engine(self.options.io, buffers)
        return [BlockPort(engine, each, self.bytes_per_block, self._slot_bytes) for each in bounces]

    def _open_engine(self, kind: IoKind, buffers: Sequence[Memory]) -> IoEngine:
        engine = self._system.open_engine(
            self._slab.data_fd, kind, buffers, self.options.queue_depth
        )
        self._engines.append(engine)
        return engine

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
        """Too many errors in a row: nothing is stored or loaded any more."""
        return self._health.is_off

    def allocate(self, num_slots: int) -> list[Slot] | None:
        """That many slots: free ones, then those of unclaimed blocks, the oldest first."""
        return self._slots.allocate(num_slots) if num_slots <= self.num_free else None

    def free(self, slots: list[Slot]) -> None:
        """Give slots back. Until a slot is used again, a restart finds its block."""
        self._slots.free(slots)

    def claim(self, keys: Sequence[BlockKey]) -> list[Slot]:
        """Slots of the longest leading run of ``keys`` that a restart found and nobody claimed.

        They are in use from now on, as if they had been allocated.
        """
        if not keys or not self.num_unclaimed or self.is_off:
            return []
        return self._slots.claim(self._found.find(as_keys(list(keys)), self._slab.table))

    def forget(self, slots: Sequence[Slot]) -> None:
        """No restart finds the blocks of these slots. The slots stay as they are."""
        try:
            self._slab.delete(np.array(slots, np.int64))
        except OSError as error:
            self._health.failed("journal", error)

    def num_welcome(self, num_blocks: int) -> int:
        """All of them, or none: when the day's writes are used up, or the tier is off."""
        is_welcome = not self.is_off and self._budget.take(num_blocks * self._slot_bytes)
        return num_blocks if is_welcome else 0

    # -- blocks ------------------------------------------------------------------------------------

    def store(
        self, names: Sequence[BlockName], slots: Sequence[Slot], addresses: Addresses
    ) -> list[bool]:
        """Write blocks. True: the block survives what ``options.durability`` says.

        A block that was not stored leaves its slot empty.
        """
        stored = np.zeros(len(names), bool)
        at = 0
        for namespace, run in groupby(names, lambda name: name.namespace):
            part = slice(at, at := at + len(list(run)))
            if not self.is_off:
                self._store_part(stored[part], namespace, names[part], slots[part], addresses[part])
        return [bool(each) for each in stored]

    def _store_part(
        self,
        stored: Bools,
        namespace: bytes,
        names: Sequence[BlockName],
        slots: Sequence[Slot],
        addresses: Addresses,
    ) -> None:
        try:
            self._store(
                stored,
                namespace,
                as_keys([name.key for name in names]),
                np.array([name.depth for name in names], np.int64),
                np.array(slots, np.int64),
                np.asarray(addresses, np.uint64),
            )
        except OSError as error:
            stored[:] = False
            self._health.failed("journal", error)

    def _store(
        self,
        stored: Bools,
        namespace: bytes,
        keys: Records,
        depths: Int64s,
        slots: Int64s,
        addresses: Uint64s,
    ) -> None:
        """The order matters: a record never names a slot whose bytes are not yet, or no longer,
        those of its block."""
        power = self.options.durability is Durability.POWER
        self._slab.delete(slots)
        if power:
            self._slab.sync_journal()
        sizes = np.full(len(slots), self.bytes_per_block, np.uint64)
        crcs = crc32c_many(addresses, sizes, self.options.checksum_threads)
        done = self._writer.write(slots, addresses, self.options.write_deadline_s)
        self._health.note("write", done)
        self._quarantine(slots, done)
        written = done == self._slot_bytes
        if power:
            try:
                self._writer.engine.sync()
            except OSError as error:
                # The kernel reports a lost write once: from here on no sync can be believed.
                self._health.switch_off(f"data could not be synced: {error}")
                return
        if written.any():
            self._slab.put(namespace, keys[written], depths[written], slots[written], crcs[written])
            if power:
                self._slab.sync_journal()
            self._health.succeeded("journal")
        stored[:] = written
        self._slab.compact_if_due()

    def load(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], addresses: Addresses
    ) -> list[LoadResult]:
        """Read blocks to ``addresses``, ``bytes_per_block`` bytes each, and verify them."""
        if not keys:
            return []
        if self.is_off:
            return [LoadResult.FAILED] * len(keys)
        at, to = np.array(slots, np.int64), np.asarray(addresses, np.uint64)
        records, trusted = self._slab.look_up(at)
        known = (records["kind"] == Kind.PUT) & same_keys(records["key"], as_keys(list(keys)))
        done = np.full(len(at), self._slot_bytes, np.int64)
        done[known] = self._reader.read(at[known], to[known], self.options.read_deadline_s)
        self._health.note("read", done[known])
        self._quarantine(at, done)
        failed = done < 0
        right = known & (done == self._slot_bytes)
        check = np.flatnonzero(right & self._to_verify(trusted))
        if len(check):
            sizes = np.full(len(check), self.bytes_per_block, np.uint64)
            crcs = crc32c_many(to[check], sizes, self.options.checksum_threads)
            right[check] = crcs == records["data_crc"][check]
            self._slab.trust(records[check[right[check]]])
        self._drop(records[known & ~right & ~failed])
        return [
            LoadResult.OK if ok else LoadResult.FAILED if bad else LoadResult.CORRUPT
            for ok, bad in zip(right.tolist(), failed.tolist(), strict=True)
        ]

    def _to_verify(self, trusted: Bools) -> Bools:
        """Which blocks of a batch have their checksum compared."""
        count = np.arange(self._num_loads, self._num_loads + len(trusted))
        self._num_loads += len(trusted)
        if self.options.verify is Verify.ALWAYS:
            return np.ones(len(trusted), bool)
        if self.options.verify is Verify.SAMPLED:
            return np.asarray(~trusted | (count % self.options.sample_every == 0))
        return ~trusted

    def _quarantine(self, slots: Int64s, done: Int64s) -> None:
        if not (done < 0).any():
            return
        bad = slots[np.isin(-done, MEDIUM_ERRORS)]
        if len(bad) and not self.is_off:  # that many errors are not about single slots
            self._slots.quarantine(bad)
            logger.warning("slots quarantined path=%s slots=%s", self.options.path, bad.tolist())
            try:
                self._slab.mark_bad(bad)
            except OSError as error:
                self._health.failed("journal", error)

    def _drop(self, seen: Records) -> Int64s:
        """Forget blocks whose bytes are wrong, unless they were rewritten since."""
        if not len(seen):
            return np.zeros(0, np.int64)
        try:
            dropped = self._slab.delete_if_unchanged(seen)
        except OSError as error:
            self._health.failed("journal", error)
            return np.zeros(0, np.int64)
        self._slots.drop_unclaimed(dropped)
        if len(dropped):
            logger.warning(
                "damaged blocks dropped path=%s slots=%s", self.options.path, dropped.tolist()
            )
        return dropped

    # -- upkeep ------------------------------------------------------------------------------------

    def scrub(self, max_bytes: int) -> ScrubReport:
        """Verify the next blocks, about ``max_bytes`` of them, whether anybody uses them or not.

        A damaged block is forgotten; one that was rewritten meanwhile is not judged.
        """
        report = ScrubReport(0, 0, (), ())
        if self.is_off:
            return report
        if self._scrubber is None:
            bounce = Bounce(SCRUB_BUFFER_BYTES // self._slot_bytes, self._slot_bytes)
            engine = self._open_engine(IoKind.PREADV, [bounce.memory])
            self._scrubber = engine, bounce
        engine, bounce = self._scrubber
        slots = self._round.take(self._slab.table, max(1, max_bytes // self._slot_bytes))
        records, _ = self._slab.look_up(slots)
        records = records[records["kind"] == Kind.PUT]
        corrupt: list[Slot] = []
        failed: list[Slot] = []
        for start in range(0, len(records), bounce.num_slots):
            part = records[start : start + bounce.num_slots]
            checked = check_blocks(
                engine, bounce, part, self.bytes_per_block, self.options.read_deadline_s
            )
            self._health.note("read", checked.done)
            wrong = (checked.done >= 0) & ~checked.right
            self._slab.trust(part[checked.right])
            corrupt += [Slot(slot) for slot in self._drop(part[wrong]).tolist()]
            unreadable = part["slot"].astype(np.int64)[checked.done < 0]
            failed += [Slot(slot) for slot in unreadable.tolist()]
            self._quarantine(part["slot"].astype(np.int64), checked.done)
        return ScrubReport(
            len(records), len(records) * self._slot_bytes, tuple(corrupt), tuple(failed)
        )

    def findings(self) -> list[Finding]:
        room = f"{self.num_slots} blocks, {self.num_slots * self._slot_bytes / 2**30:.2f} GiB"
        state = (f"{room}, off", self._health.reason) if self.is_off else (room, "")
        direct = "" if self._slab.is_direct else "the file system has no O_DIRECT"
        return [
            Finding("disk tier", *state),
            Finding("disk path", str(self.options.path), direct),
            Finding("disk durability", self.options.durability.value),
            Finding("disk verify", self.options.verify.value),
            Finding("disk quarantined", str(self.num_quarantined)),
        ]

    def check_invariants(self) -> None:
        """Raise AssertionError where counts disagree. O(num_slots); nothing else may run."""
        self._slots.check_invariants()

    def close(self) -> None:
        """Everything on the medium, and the slab free for its next owner."""
        if self._is_closed:
            return
        self._is_closed = True
        for engine in self._engines:
            engine.close()
        self._slab.close(clean=not self.is_off)
