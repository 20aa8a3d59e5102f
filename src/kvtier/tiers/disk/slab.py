"""An open slab: its files, and the deciding record of each slot."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import numpy as np

from kvtier.core.system.private_files import open_file
from kvtier.tiers.disk.arrays import Bools, Int64s, Uint32s, Uint64s
from kvtier.tiers.disk.format.compaction import SLICE_RECORDS, Compaction
from kvtier.tiers.disk.format.folder import JOURNAL, NEW_JOURNAL, OwnerLock
from kvtier.tiers.disk.format.journal import (
    COMPACT_FLOOR,
    DUE_SHARE,
    PACE,
    STEP_RECORDS,
    Journal,
    make_spare,
    max_journal_bytes,
)
from kvtier.tiers.disk.format.records import (
    RecordKind,
    Records,
    SequenceNumbers,
    are_live,
    blank,
    seal,
)
from kvtier.tiers.disk.format.superblock import (
    FORMAT_VERSION,
    HALF_BYTES,
    DataMark,
    Membership,
    Superblock,
)
from kvtier.tiers.disk.format.trust import mark_of, write_trust
from kvtier.tiers.disk.recovery import Recovery
from kvtier.tiers.disk.system import DiskSystem

logger = logging.getLogger(__name__)

MAX_U32 = 0xFFFFFFFF
MAX_NAMESPACES = 0xFFFF
UNNAMED = 0
"""Number for namespaces without a number of their own, after all are used."""


class Slab:
    """An open slab, made by ``opening.open_slabs`` or ``opening.open_slab``.

    Each change is appended to the journal first, and applied in memory then. The next owner
    recovers exactly the records in the journal.

    Thread-safe, except for ``compact``, ``compact_if_due``, ``mend`` and ``close``, which one
    thread at a time may call. A change that fails raises ``OSError`` and has no effect. In a forked
    child, changes raise ``Closed``.

    A thread that changes slots holds ``_change_lock`` from its lookup to the append.
    ``_table_lock`` is held for short memory accesses only, so no lookup waits for a disk or a
    compaction.

    Args:
        folder: directory of the slab.
        lock: lock of the owner.
        superblock: current superblock.
        found: state recovered from the journal.
        files: open files.
        trusted: bool [num_slots], slots whose data needs no verification.
        system: calls to the operating system.
        clock: unix time, for records.

    Attributes:
        table: deciding record of each slot, for use while no other thread uses the slab.
        numbers: source of sequence numbers for records; the slabs of a set share one.
        compact_floor: number of dead records below which the journal is not compacted.
    """

    def __init__(
        self,
        folder: Path,
        lock: OwnerLock,
        superblock: Superblock,
        found: Recovery,
        files: SlabFiles,
        trusted: Bools,
        system: DiskSystem,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.superblock = superblock
        self.data_fd, self.is_direct = files.data_fd, files.is_direct
        self.table = found.rows
        self.numbers = SequenceNumbers(found.next_seq)
        self.compact_floor = COMPACT_FLOOR
        self._superblock_fd = files.superblock_fd
        self._journal = Journal(files.journal_fd, files.journal_bytes, system)
        self._owner = lock
        self._system = system
        self._clock = clock
        self._trusted = trusted
        self._change_lock = Lock()
        self._table_lock = Lock()
        self._has_lost_a_sync = False
        self._ages: Uint64s | None = found.ages
        self._names = {digest: number for number, digest in found.namespaces.items()}
        self._last_number = max(found.last_number, *found.namespaces, 0)
        self._num_live = found.rows.num_live()
        self._compaction: Compaction | None = None
        self._is_compacting = False
        self._num_seen = 0

    # -- queries -----------------------------------------------------------------------------------

    def take_ages(self) -> Uint64s:
        """Return ``Recovery.ages``, once only: it is outdated as soon as slots change."""
        ages, self._ages = self._ages, None
        assert ages is not None, "the ages were taken before"
        return ages

    @property
    def num_dead(self) -> int:
        """Number of superseded records in the journal."""
        return self._journal.num_records - self._num_live - len(self._names) - 1

    @property
    def journal_bytes(self) -> int:
        return self._journal.num_bytes

    @property
    def num_missing_bytes(self) -> int:
        """Bytes by which the data file is too short for its slots; above 0 if it was cut short."""
        num_bytes = os.fstat(self.data_fd).st_size
        return max(0, self.superblock.num_slots * self.superblock.slot_bytes - num_bytes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory used for the slots."""
        return self.table.num_bytes + self._trusted.nbytes

    def look_up(self, slots: Int64s) -> tuple[Records, Bools]:
        """Return the slots' records, with the fields kept in memory, and which slots are trusted.

        Never waits for a disk.
        """
        with self._table_lock:
            return self.table.of(slots), self._trusted[slots]

    def trust(self, seen: Records) -> None:
        """Mark the slots with these records as verified, unless they were rewritten."""
        with self._table_lock:
            self._trusted[self._unchanged(seen)] = True

    def _unchanged(self, seen: Records) -> Int64s:
        """Return the slots that were not rewritten since their record was seen."""
        slots = seen["slot"].astype(np.int64)
        return np.asarray(slots[self.table.seqs(slots) == seen["seq"]], np.int64)

    # -- changes -----------------------------------------------------------------------------------

    def put(
        self,
        namespace: bytes,
        keys: Records,
        depths: Int64s,
        slots: Int64s,
        data_crcs: Uint32s,
        numbers: Uint64s,
    ) -> Bools:
        """Record that the slots hold these blocks, whose data has been written.

        Args:
            namespace: digest of the namespace of all blocks.
            keys: V32 [n], key of each block.
            depths: int64 [n], position of each block in its prompt.
            slots: int64 [n], slot of each block.
            data_crcs: uint32 [n], crc32c of each block.
            numbers: uint64 [n], sequence numbers that were taken before the data was written.

        Returns:
            Bool [n]. False for a slot that has a newer record, for instance because it can't be
            read; that record stays in force.
        """
        with self._change_lock:
            is_newest: Bools = np.asarray(self.table.seqs(slots) < numbers)
            keys, depths, slots = keys[is_newest], depths[is_newest], slots[is_newest]
            number = self._names.get(namespace, UNNAMED)
            is_new = namespace not in self._names and self._last_number < MAX_NAMESPACES
            naming = blank(int(is_new), RecordKind.NAMESPACE)
            if is_new:
                number = self._last_number + 1
                naming["namespace"] = number
                naming["key"] = np.frombuffer(namespace, "V32")
                naming["seq"] = self.numbers.take(1)
            records = blank(len(slots), RecordKind.PUT)
            records["namespace"] = number
            records["slot"] = slots
            records["depth"] = np.minimum(depths, MAX_U32)
            records["time"] = self._now()
            records["data_crc"] = data_crcs[is_newest]
            records["key"] = keys
            records["seq"] = numbers[is_newest]
            self._append(np.concatenate([naming, records]), trusted=slots)
            if is_new:
                self._names[namespace] = self._last_number = number
            return is_newest

    def delete(self, slots: Int64s) -> None:
        """Record that the slots are empty. Slots that are empty already need no record."""
        with self._change_lock:
            slots = slots[self.table.kinds[slots] == RecordKind.PUT]
            self._append(self._about(slots, RecordKind.DEL))

    def delete_if_unchanged(self, seen: Records) -> Int64s:
        """Record that slots are empty if their record is still the ``seen`` one; return them."""
        with self._change_lock:
            slots = self._unchanged(seen)
            self._append(self._about(slots, RecordKind.DEL))
            return slots

    def mark_bad(self, slots: Int64s) -> None:
        """Record that the slots can't be read or written.

        If this record can't be written either, only this process knows.
        """
        with self._change_lock:
            self._append(self._about(slots, RecordKind.BAD))

    def _about(self, slots: Int64s, kind: RecordKind) -> Records:
        records = blank(len(slots), kind)
        records["slot"] = slots
        records["time"] = self._now()
        records["seq"] = self.numbers.take(len(records))
        return records

    def _now(self) -> int:
        """Return the unix time, clipped to 32 bits."""
        return min(max(0, int(self._clock())), MAX_U32)

    def _append(self, records: Records, trusted: Int64s | None = None) -> None:
        """Append ``records``, and make them the deciding ones. The caller holds ``_change_lock``.

        trusted: slots whose data needs no verification.
        """
        if not len(records):
            return
        self._owner.process.must_be_here("the slab")
        seal(records)
        self._journal.append(records)
        records = records[records["kind"] != RecordKind.NAMESPACE]
        before = are_live(self.table.kinds[records["slot"]])
        self._num_live += int(are_live(records["kind"]).sum()) - int(before.sum())
        with self._table_lock:
            self.table.set(records)
            if trusted is not None:
                self._trusted[trusted] = True

    def sync_journal(self) -> None:
        """Wait until the journal is on the medium."""
        if not self._journal.is_synced:
            try:
                self._journal.sync()
            except OSError:
                self.distrust()
                raise

    def distrust(self) -> None:
        """Trust no block any more, after a failed sync.

        Earlier writes may be lost, and no later sync would report that. So every block is verified
        when it is read, by this process and after a restart.
        """
        self._has_lost_a_sync = True
        with self._table_lock:
            self._trusted[:] = False

    # -- compaction --------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Reserve space for the journal to grow, and for its successor.

        A slab works without this space, until the file system is full.
        """
        try:
            self._journal.reserve(max_journal_bytes(len(self.table)))
            make_spare(self.folder, len(self.table), self._system)
        except OSError as error:
            logger.warning("no room reserved for the journal path=%s error=%s", self.folder, error)

    def compact_if_due(self) -> None:
        """Continue a running compaction, or begin one if enough records are dead.

        Called after every stored batch. Each call copies ``STEP_RECORDS`` records, or more after a
        large batch.
        """
        if self._is_compacting or self._journal.is_broken:
            return
        is_due = self.num_dead > max(DUE_SHARE * self._num_live, self.compact_floor)
        if not is_due and self._compaction is None:
            return
        if self._compaction is None:
            self._num_seen = self._journal.num_records
        num_records = max(STEP_RECORDS, PACE * (self._journal.num_records - self._num_seen))
        is_replaced = False
        try:
            is_replaced = self._compact_some(num_records)
        except OSError as error:
            self.compact_floor = 2 * self.num_dead  # do not retry with every batch
            logger.warning("journal not compacted path=%s error=%s", self.folder, error)
        finally:
            self._num_seen = self._journal.num_records
        if is_replaced:
            try:
                self._write_superblock(generation=self.superblock.generation + 1)
            except OSError as error:
                logger.warning("superblock not written path=%s error=%s", self.folder, error)

    def compact(self) -> None:
        """Copy the deciding records to a new journal, and replace the old one by it, now.

        Other threads may append meanwhile; their records are copied, too.
        """
        self._drop_compaction()
        while not self._compact_some(self._journal.num_records):
            pass
        self._write_superblock(generation=self.superblock.generation + 1)

    def mend(self) -> None:
        """Compact the journal if it can't be appended to. Raise ``OSError`` on failure."""
        if self._journal.is_broken:
            self.compact()

    def _compact_some(self, num_records: int) -> bool:
        """Copy ``num_records`` records of the old journal.

        If few records are left, finish the compaction, and return True. After an error the old
        journal stays in use.
        """
        self._is_compacting = True
        try:
            going = self._compaction = self._compaction or self._begin_compaction()
            going.copy(num_records)
            going.name(self._names)
            going.fresh.sync()
            if going.num_left > SLICE_RECORDS:
                return False
            self._finish_compaction(going)
        except Exception:
            self._drop_compaction()
            raise
        finally:
            self._is_compacting = False
        self._spare()
        return True

    def _begin_compaction(self) -> Compaction:
        fd = open_file(self.folder / NEW_JOURNAL, os.O_RDWR | os.O_CREAT)
        fresh = Journal(fd, 0, self._system)
        generation = self.superblock.generation + 1
        try:
            if os.fstat(fd).st_size:  # truncating an empty file would free the reserved space
                self._system.truncate(fd, 0)
            with contextlib.suppress(OSError):
                fresh.reserve(max_journal_bytes(len(self.table)))
            with self._change_lock:  # so that each record is either in the table, or after the mark
                slab_id = self.superblock.slab_id
                return Compaction(self._journal, fresh, self.table, slab_id, generation)
        except BaseException:
            fresh.close()
            raise

    def _finish_compaction(self, going: Compaction) -> None:
        """Replace the old journal by the new one. Changes wait meanwhile; lookups don't."""
        with self._change_lock:
            going.copy(going.num_left)
            lost = going.missing()
            if len(lost):
                going.fresh.append(lost)
                logger.warning("journal was damaged path=%s num=%d", self.folder, len(lost))
            going.name(self._names)
            if not going.fresh.is_synced:
                going.fresh.sync()
            self._replace_journal(going.fresh)
            self._compaction = None
            if len(lost):
                with self._table_lock:
                    self.table.set(lost)
            used = going.is_used
            self._names = {digest: each for digest, each in self._names.items() if used[each]}
            self._last_number = max(self._names.values(), default=0)

    def _replace_journal(self, fresh: Journal) -> None:
        try:
            self._system.replace(self.folder / NEW_JOURNAL, self.folder / JOURNAL)
        except OSError as error:
            # It is unknown which of the two journals the next owner will see.
            self._journal.give_up(error)
            raise
        self._journal.close()
        self._journal = fresh

    def _drop_compaction(self) -> None:
        """Discard an unfinished new journal."""
        going, self._compaction = self._compaction, None
        if going is not None:
            going.fresh.close()
            self._spare()

    def _spare(self) -> None:
        with contextlib.suppress(OSError):
            make_spare(self.folder, len(self.table), self._system)

    # -- superblock, end ---------------------------------------------------------------------------

    def _write_superblock(
        self,
        generation: int | None = None,
        member: Membership | None = None,
        is_clean: bool = False,
        data: DataMark | None = None,
    ) -> None:
        current = dataclasses.replace(
            self.superblock,
            version=FORMAT_VERSION,
            epoch=self.superblock.epoch + 1,
            generation=self.superblock.generation if generation is None else generation,
            member=member or self.superblock.member,
            is_clean=is_clean,
            data=data or DataMark(),
            journal_bytes=self._journal.num_bytes,
        )
        write_superblock(self._superblock_fd, current, self._system)
        self.superblock = current

    def mark_open(self, member: Membership | None = None) -> None:
        """Mark the slab as open: without a clean close, a restart verifies all blocks.

        member: new membership in a set; None to keep the current one.
        """
        self._write_superblock(member=member)

    def settle(self, member: Membership) -> bool:
        """Sync everything, and mark the slab as closed in order. Return False on failure.

        The next owner trusts the blocks that this one wrote, verified or trusted. Nothing may be
        written afterwards.
        """
        if not self._owner.process.is_here:
            return False  # the owner still uses the slab
        if self._journal.is_broken or self._has_lost_a_sync:
            return False
        try:
            data = mark_of(self._system.stamp(self.data_fd))
            self._system.sync(self.data_fd)
            self._drop_compaction()
            self._journal.sync()
            write_trust(self.folder, self._trusted, self.table, self.superblock, self._system)
            self._write_superblock(member=member, is_clean=True, data=data)
        except OSError as error:
            logger.warning("slab not closed in order path=%s error=%s", self.folder, error)
            return False
        return True

    def advance(self, member: Membership) -> None:
        """Record that the other slabs of the set are settled, too. Called after ``settle``."""
        try:
            self._write_superblock(member=member, is_clean=True, data=self.superblock.data)
        except OSError as error:
            logger.warning("slab not closed in order path=%s error=%s", self.folder, error)

    def close(self, clean: bool = True) -> None:
        """Close the files. clean: call ``settle`` first."""
        try:
            if clean:
                self.settle(self.superblock.member)
        finally:
            os.close(self.data_fd)
            os.close(self._superblock_fd)
            if self._compaction is not None:
                self._compaction.fresh.close()
            self._journal.close()
            self._owner.close()


@dataclasses.dataclass(frozen=True, slots=True)
class SlabFiles:
    """Open files of a slab. is_direct: the data file bypasses the page cache (O_DIRECT)."""

    data_fd: int
    is_direct: bool
    superblock_fd: int
    journal_fd: int
    journal_bytes: int


def write_superblock(fd: int, superblock: Superblock, system: DiskSystem) -> None:
    """Overwrite the older of the two superblocks, and wait until it is on the medium."""
    system.write_at(fd, superblock.encode(), superblock.epoch % 2 * HALF_BYTES)
    system.sync(fd)
