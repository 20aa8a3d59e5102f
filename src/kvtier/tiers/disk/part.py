"""One disk's part of every block: a slab, its I/O engines, and the verification of its bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from math import inf

import numpy as np

from kvtier.core.errors import DeviceError, TierError
from kvtier.core.types import BlockKey, BlockName, Direct, Durability, IoKind, Slot, keys_of
from kvtier.devices.base import Finding, Memory
from kvtier.tiers.disk.accelerator import Accelerator
from kvtier.tiers.disk.arrays import Bools, Int64s, Uint32s, Uint64s
from kvtier.tiers.disk.bounce import BlockPort, Bounce
from kvtier.tiers.disk.direct import Pool, PoolPath, check_library, choose, find_pool_path
from kvtier.tiers.disk.format.records import RecordKind, Records, as_keys, same_keys
from kvtier.tiers.disk.health import LATE, MEDIUM_ERRORS, DiskHealth
from kvtier.tiers.disk.inspect.scrub import RoundRobin, check_blocks
from kvtier.tiers.disk.io import IoEngine
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.disk.slab import Slab
from kvtier.tiers.disk.slots import DiskSlots
from kvtier.tiers.disk.system import DiskSystem
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import ScrubReport

logger = logging.getLogger(__name__)

SCRUB_BUFFER_BYTES = 4 << 20
PATIENT_SHARE = 0.5
"""Share of the disk's own deadline. If a call with less time than this share times out, that is no
evidence about the disk's health."""

NO_SLOTS: Int64s = np.zeros(0, np.int64)


class DiskPart:
    """One rank's or one disk's part of every block: slot i holds the part of block i.

    One I/O engine serves a writer and a reader, each with a bounce buffer. There may be a path to
    an accelerator's memory.

    Args:
        options: settings of this disk.
        slab: the slab; the caller closes it after ``close``.
        arena: memory that most blocks are written from and read into; None if there is no host
            tier, and the CPU does not reach the pool.
        system: calls to the operating system.
        clock: monotonic clock for pauses, in seconds.
        slots: states of the slots. They are updated when a slot can't be read or written, or holds
            wrong bytes.
        pool: this disk's part of the engine's KV pool, if blocks may go directly to it.

    Attributes:
        reads, writes: health of the disk in each direction.
        pool_path: path of blocks to the pool.
        accelerator: path to the accelerator's memory; None if blocks pass through a host tier, or
            the pool is in host memory.

    The caller guarantees
        one thread stores, one loads, one scrubs; they may run concurrently. A slot is never stored
        to and loaded from at once. Once per batch the caller asks ``reads`` or ``writes`` whether
        the disk may be used.
    Outcomes and errors
        no method raises for errors of the disk; ``reads`` and ``writes`` count them.
        The constructor raises ``TierError``, and ``ConfigError`` if direct transfers are required
        but impossible.
    """

    def __init__(
        self,
        options: DiskOptions,
        slab: Slab,
        arena: Memory | None,
        system: DiskSystem,
        clock: Callable[[], float],
        slots: DiskSlots,
        pool: Pool | None = None,
    ) -> None:
        self.options = options
        self.slab = slab
        self.num_bytes = self.slab.superblock.block_bytes
        self.slot_bytes = self.slab.superblock.slot_bytes
        limit = options.errors_until_off
        self.reads = DiskHealth(str(options.path), ["read"], limit, clock)
        self.writes = DiskHealth(str(options.path), ["write", "journal"], limit, clock)
        self._slots = slots
        self._num_loads = 0
        self._is_short = False
        self._round = RoundRobin()
        self._scrubber: tuple[IoEngine, Bounce] | None = None
        self._system = system
        self._engines: list[IoEngine] = []
        self.pool_path = find_pool_path(options, pool, self.slot_bytes, slab.is_direct)
        self.accelerator: Accelerator | None = None
        try:
            self._writer, self._reader = self._open(arena, pool, clock)
        except BaseException:
            self.close()
            raise

    # -- paths between slots and memory ------------------------------------------------------------

    def _open(
        self, arena: Memory | None, pool: Pool | None, clock: Callable[[], float]
    ) -> tuple[BlockPort, BlockPort]:
        options = self.options
        num_slots = min(options.bounce_bytes // self.slot_bytes, self.slab.superblock.num_slots)
        there, back = (Bounce(num_slots, self.slot_bytes) for _ in range(2))
        self._open_accelerator(pool, back.memory, arena is not None, clock)
        engine = self._open_engine(options.io, self._registered(arena, pool, (there, back)))
        writer = BlockPort(engine, there, self.num_bytes, options.checksum_threads)
        reader = BlockPort(engine, back, self.num_bytes, accelerator=self.accelerator)
        return writer, reader

    def _open_engine(self, kind: IoKind, buffers: Sequence[Memory]) -> IoEngine:
        """Open another I/O engine for the slab; ``close`` closes it."""
        depth = self.options.queue_depth
        engine = self._system.open_engine(self.slab.data_fd, kind, buffers, depth)
        self._engines.append(engine)
        return engine

    def _registered(
        self, arena: Memory | None, pool: Pool | None, bounces: Sequence[Bounce]
    ) -> list[Memory]:
        """Return the memory to register with the engine.

        Registered memory stays resident, so rarely used buffers and pools are left out.
        """
        pool = pool if pool is not None and pool.device is None else None
        is_pool = arena is not None and pool is not None and arena.address == pool.memory.address
        has_tail = self.num_bytes != self.slot_bytes
        has_only_buffers = arena is None and self.accelerator is not None
        if has_tail or has_only_buffers or (is_pool and self.pool_path.reason):
            return [bounce.memory for bounce in bounces]
        memories = [arena] if arena is not None else []
        if self.options.direct is Direct.ON and pool is not None and not is_pool:
            memories += pool.allocations
        return memories

    def _open_accelerator(
        self, pool: Pool | None, buffer: Memory, has_host: bool, clock: Callable[[], float]
    ) -> None:
        """Open the path to the accelerator's memory.

        has_host: there is a host tier to go through.
        """
        options = self.options
        if pool is None or pool.device is None or options.direct is Direct.OFF:
            return
        if has_host and self.pool_path.reason:
            return
        what = f"{options.path}, direct to {pool.device.name}"
        health = DiskHealth(what, ["read"], options.errors_until_off, clock)
        try:
            self.accelerator = Accelerator(pool, buffer, health)
            if not self.pool_path.reason:
                self.accelerator.open(self.slab.data_fd, self.pool_path.is_compatible)
        except (DeviceError, TierError) as error:
            self.pool_path = PoolPath(str(error), self.pool_path.probe)
            check_library(options, pool.device, self.pool_path.reason)
            if has_host and self.accelerator is not None:
                self.accelerator.close()
                self.accelerator = None

    # -- blocks ------------------------------------------------------------------------------------

    def empty(self, slots: Int64s) -> bool:
        """Record in the journal that these slots are empty.

        Return False if the journal can't be written.
        """
        try:
            self.slab.delete(slots)
            if self.options.durability is Durability.POWER:
                self.slab.sync_journal()
        except OSError as error:
            self.writes.failed("journal", error)
            return False
        return True

    def mend(self) -> bool:
        """Begin a new journal if the old one cannot be appended to. Return True on success."""
        try:
            self.slab.mend()
        except OSError as error:
            self.writes.failed("journal", error)
            return False
        return True

    def store(
        self,
        names: Sequence[BlockName],
        slots: Sequence[Slot],
        blocks: Pieces,
        numbers: Uint64s,
        ends_at: float = inf,
    ) -> Bools:
        """Write the parts in ``blocks`` into empty slots; see ``DiskBlocks.store``.

        numbers: uint64 [n], sequence number of each block's records, the same in all parts; from
            the slab's ``numbers``.

        Returns bool [n]. False: the slot is empty.
        """
        stored = np.zeros(len(names), bool)
        num_opened = self.writes.num_opened
        limit = _Limit(self.options.write_deadline_s, ends_at)
        at = 0
        for namespace, run in groupby(names, lambda name: name.namespace):
            piece = slice(at, at := at + len(list(run)))
            if self.writes.num_opened > num_opened or time.monotonic() >= limit.ends_at:
                break  # the rest would have to wait, too
            try:
                self._store(
                    stored[piece],
                    namespace,
                    names[piece],
                    np.array(slots[piece], np.int64),
                    blocks.pick(piece),
                    numbers[piece],
                    limit,
                )
            except OSError as error:
                stored[piece] = False
                self.writes.failed("journal", error)
        return stored

    def _store(
        self,
        stored: Bools,
        namespace: bytes,
        names: Sequence[BlockName],
        slots: Int64s,
        blocks: Pieces,
        numbers: Uint64s,
        limit: _Limit,
    ) -> None:
        """Store blocks of one namespace. The order of the writes matters.

        The caller has called ``empty`` before. A record is written only after the bytes of its
        slot.
        """
        keys = as_keys(keys_of(names))
        depths = np.array([name.depth for name in names], np.int64)
        power = self.options.durability is Durability.POWER
        done, crcs = self._writer.write(slots, blocks, limit.ends_at)
        self.writes.note("write", done, limit.is_patient)
        self._quarantine(slots, done, self.writes)
        written = done == self.slot_bytes
        if power:
            try:
                self._writer.engine.sync()
            except OSError as error:
                # The kernel reports a lost write once, and it may concern any block.
                self.slab.distrust()
                self.writes.trip(f"data could not be synced: {error}")
                return
        at = np.flatnonzero(written)
        if len(at):
            put = self.slab.put(namespace, keys[at], depths[at], slots[at], crcs[at], numbers[at])
            if power:
                self.slab.sync_journal()
            self.writes.succeeded("journal")
            stored[at[put]] = True
        self.slab.compact_if_due()

    def load(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[Slot],
        blocks: Pieces,
        ends_at: float = inf,
    ) -> tuple[Bools, Bools]:
        """Read parts into ``blocks``; see ``DiskBlocks.load``.

        Returns two arrays, bool [n]: which parts are right, verified as ``options.verify`` says,
        and which could not be read.
        """
        limit = _Limit(self.options.read_deadline_s, ends_at)
        at = np.array(slots, np.int64)
        records, trusted = self.slab.look_up(at)
        known = (records["kind"] == RecordKind.PUT) & same_keys(records["key"], as_keys(keys))
        done = np.full(len(at), self.slot_bytes, np.int64)
        crcs = np.zeros(len(at), np.uint32)
        verified = np.zeros(len(at), bool)
        there = blocks.pick(np.flatnonzero(known))
        done[known], crcs[known], verified[known] = self._read(
            at[known], there, trusted[known], limit
        )
        self._quarantine(at, done, self.reads)
        failed = done < 0
        right = known & (done == self.slot_bytes)
        check = np.flatnonzero(right & verified)
        if len(check):
            right[check] = crcs[check] == records["data_crc"][check]
            self.slab.trust(records[check[right[check]]])
        self._drop(records[known & ~right & ~failed])
        return right, failed

    def _read(
        self, slots: Int64s, blocks: Pieces, trusted: Bools, limit: _Limit
    ) -> tuple[Int64s, Uint32s, Bools]:
        """Read slots; return bytes or -errno, checksums, and which checksums were computed.

        Checksums are computed on the CPU. So if blocks go to accelerator memory, those that have to
        be verified pass through the bounce buffer. So do those whose direct read failed: only if
        the disk fails again is the error counted as the disk's, not the library's.
        """
        far = None if blocks.is_host else self.accelerator
        is_far = far is not None and far.enter()
        options = self.options
        checked = choose(trusted, options.verify, self._num_loads, options.sample_every)
        self._num_loads += len(trusted)
        direct = ~checked if is_far else np.ones(len(slots), bool)
        if far is not None:
            direct = direct & far.holds(blocks) if is_far else np.zeros(len(slots), bool)
        read = self._reader.read
        done, crcs = read(slots, blocks, checked, limit.ends_at, direct)
        if far is None or not direct.any():
            self.reads.note("read", done, limit.is_patient)
            return done, crcs, checked
        far.note(done[direct])
        late = direct & np.isin(-done, LATE)
        if (again := np.flatnonzero(direct & ~late & (done != self.slot_bytes))).size:
            everything = np.ones(len(again), bool)
            done[again], crcs[again] = read(
                slots[again], blocks.pick(again), everything, limit.ends_at, ~everything
            )
            checked[again] = True
        self.reads.note("read", done[~late], limit.is_patient)
        return done, crcs, checked

    def _quarantine(self, slots: Int64s, done: Int64s, health: DiskHealth) -> None:
        if not (done < 0).any():
            return
        bad = slots[np.isin(-done, MEDIUM_ERRORS)]
        # While the breaker is open, errors concern the disk, not single slots.
        if len(bad) and not health.breaker.is_open:
            self._slots.quarantine(bad)
            logger.warning("slots quarantined path=%s slots=%s", self.options.path, bad.tolist())
            try:
                self.slab.mark_bad(bad)
            except OSError as error:
                self.writes.failed("journal", error)

    def _drop(self, seen: Records) -> Int64s:
        """Drop blocks whose bytes are wrong, unless they were rewritten since."""
        if not len(seen):
            return NO_SLOTS
        try:
            dropped = self.slab.delete_if_unchanged(seen)
        except OSError as error:
            self.writes.failed("journal", error)
            return NO_SLOTS
        self._slots.drop_unclaimed(dropped)
        if len(dropped):
            logger.warning(
                "damaged blocks dropped path=%s slots=%s", self.options.path, dropped.tolist()
            )
            self._tell_if_short()
        return dropped

    def is_short(self) -> bool:
        """Return whether the data file was cut short, and has not been extended again."""
        if self._is_short:
            self._tell_if_short()
        return self._is_short

    def _tell_if_short(self) -> None:
        """Log once that the data file was cut short, and once that it was extended again."""
        try:
            num_missing = self.slab.num_missing_bytes
        except OSError:
            return
        if num_missing and not self._is_short:
            logger.error(
                "slab is shorter than it was path=%s missing_bytes=%d: something cut its data file "
                "short while it was in use; find out what, then restart: the slab gets its "
                "length back, and the blocks that were cut off are recomputed",
                self.options.path,
                num_missing,
            )
        elif self._is_short and not num_missing:
            logger.info("slab has its length again path=%s", self.options.path)
        self._is_short = bool(num_missing)

    # -- upkeep ------------------------------------------------------------------------------------

    def scrub(self, max_bytes: int) -> ScrubReport:
        """Verify the next blocks, about ``max_bytes`` of them, whether they are in use or not.

        A damaged block is dropped, unless it was rewritten meanwhile.
        """
        if self._scrubber is None:
            bounce = Bounce(SCRUB_BUFFER_BYTES // self.slot_bytes, self.slot_bytes)
            engine = self._open_engine(IoKind.PREADV, [bounce.memory])
            self._scrubber = engine, bounce
        engine, bounce = self._scrubber
        slots = self._round.take(self.slab.table.kinds, max(1, max_bytes // self.slot_bytes))
        records, _ = self.slab.look_up(slots)
        records = records[records["kind"] == RecordKind.PUT]
        num_damaged = num_failed = 0
        for start in range(0, len(records), bounce.num_slots):
            part = records[start : start + bounce.num_slots]
            done, right = check_blocks(
                engine, bounce, part, self.num_bytes, self.options.read_deadline_s
            )
            self.reads.note("read", done)
            self.slab.trust(part[right])
            num_damaged += len(self._drop(part[(done >= 0) & ~right]))
            num_failed += int((done < 0).sum())
            self._quarantine(part["slot"].astype(np.int64), done, self.reads)
        num_bytes = len(records) * self.slot_bytes
        return ScrubReport(len(records), num_bytes, num_damaged, num_failed)

    def findings(self) -> list[Finding]:
        """Return the path, the I/O engines in use, and the state of the path to an accelerator."""
        direct = "" if self.slab.is_direct else "the file system has no O_DIRECT"
        lines = [Finding("disk path", str(self.options.path), direct)]
        lines += self._writer.engine.findings()
        if self.pool_path.probe is not None:
            lines.append(self.pool_path.probe.finding())
        if self.accelerator is not None and (state := self.accelerator.state()):
            lines.append(Finding("direct reads", "not now", state))
        return lines

    def close(self) -> None:
        """Close the I/O engines. The slab stays open."""
        if self.accelerator is not None:
            self.accelerator.close()
        for engine in self._engines:
            engine.close()


class _Limit:
    """Time limit of a call: the disk's own deadline or the caller's, whichever is earlier.

    is_patient: whether the limit is long enough for a timeout to be evidence about the disk.
    """

    def __init__(self, deadline_s: float, ends_at: float) -> None:
        now = time.monotonic()
        self.ends_at = min(ends_at, now + deadline_s)
        self.is_patient = self.ends_at - now >= PATIENT_SHARE * deadline_s
