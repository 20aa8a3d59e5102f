"""An open slab: its files, and the deciding record of each slot."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.tiers.disk.format.folder import OwnerLock
from kvtier.tiers.disk.format.journal import Journal
from kvtier.tiers.disk.format.log import Log
from kvtier.tiers.disk.format.records import RecordKind, Records, blank
from kvtier.tiers.disk.format.rows import SlotRows
from kvtier.tiers.disk.format.sequence import Sequence
from kvtier.tiers.disk.format.superblock import (
    FORMAT_VERSION,
    HALF_BYTES,
    DataMark,
    Membership,
    Superblock,
)
from kvtier.tiers.disk.recovery.recovery import Recovery
from kvtier.tiers.disk.recovery.trust import mark_of, write_trust
from kvtier.tiers.disk.system import DiskSystem

logger = logging.getLogger(__name__)

MAX_U32 = 0xFFFFFFFF

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


class Slab:
    """An open slab, made by ``opening.open_slabs`` or ``opening.open_slab``.

    Each change is appended to the journal first, and applied in memory then. The next owner
    recovers exactly the records in the journal.

    Thread-safe, except for ``compact``, ``compact_if_due``, ``mend`` and ``close``, which one
    thread at a time may call. A change that fails raises ``OSError`` and has no effect. In a forked
    child, changes raise ``Closed``.

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
        numbers: source of sequence numbers for records; the slabs of a set share one.
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
        self._superblock_fd = files.superblock_fd
        self._owner = lock
        self._system = system
        self._clock = clock
        self._has_lost_a_sync = False
        self._ages: Uint64s | None = found.ages
        self.numbers = Sequence(found.next_seq)
        journal = Journal(files.journal_fd, files.journal_bytes, system)
        self._log = Log(folder, journal, found, trusted, system)

    # -- queries -----------------------------------------------------------------------------------

    @property
    def table(self) -> SlotRows:
        """Deciding record of each slot, for use while no other thread uses the slab."""
        return self._log.rows

    def take_ages(self) -> Uint64s:
        """Return ``Recovery.ages``, once only: it is outdated as soon as slots change."""
        ages, self._ages = self._ages, None
        assert ages is not None, "the ages were taken before"
        return ages

    @property
    def num_dead(self) -> int:
        """Number of superseded records in the journal."""
        return self._log.num_dead

    @property
    def journal_bytes(self) -> int:
        return self._log.journal.num_bytes

    @property
    def num_missing_bytes(self) -> int:
        """Bytes by which the data file is too short for its slots; above 0 if it was cut short."""
        num_bytes = os.fstat(self.data_fd).st_size
        return max(0, self.superblock.num_slots * self.superblock.slot_bytes - num_bytes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory used for the slots."""
        return self._log.rows.num_bytes + self._log.trusted.nbytes

    def look_up(self, slots: Int64s) -> tuple[Records, Bools]:
        """Return the slots' records, with the fields kept in memory, and which slots are trusted.

        Never waits for a disk.
        """
        return self._log.look_up(slots)

    def trust(self, seen: Records) -> None:
        """Mark the slots with these records as verified."""
        self._log.trust(seen)

    # -- changes -----------------------------------------------------------------------------------

    def put(
        self,
        namespace: bytes,
        keys: Records,
        depths: Int64s,
        slots: Int64s,
        data_crcs: npt.NDArray[np.uint32],
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
        with self._log.changes:
            is_newest: Bools = np.asarray(self._log.rows.seqs(slots) < numbers)
            keys, depths, slots = keys[is_newest], depths[is_newest], slots[is_newest]
            number, naming = self._log.number(namespace)
            naming["seq"] = self.numbers.take(len(naming))
            records = blank(len(slots), RecordKind.PUT)
            records["namespace"] = number
            records["slot"] = slots
            records["depth"] = np.minimum(depths, MAX_U32)
            records["time"] = self._now()
            records["data_crc"] = data_crcs[is_newest]
            records["key"] = keys
            records["seq"] = numbers[is_newest]
            self._append(np.concatenate([naming, records]), trusted=slots)
            if len(naming):
                self._log.named(namespace, number)
            return is_newest

    def delete(self, slots: Int64s) -> None:
        """Record that the slots are empty. Slots that are empty already need no record."""
        with self._log.changes:
            slots = slots[self._log.rows.kinds[slots] == RecordKind.PUT]
            self._append(self._about(slots, RecordKind.DEL))

    def delete_if_unchanged(self, seen: Records) -> Int64s:
        """Record that slots are empty if their record is still the ``seen`` one; return them."""
        with self._log.changes:
            slots = self._log.unchanged(seen)
            self._append(self._about(slots, RecordKind.DEL))
            return slots

    def mark_bad(self, slots: Int64s) -> None:
        """Record that the slots can't be read or written.

        If this record can't be written either, only this process knows.
        """
        with self._log.changes:
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
        if len(records):
            self._owner.process.must_be_here("the slab")
            self._log.append(records, trusted)

    def sync_journal(self) -> None:
        """Wait until the journal is on the medium."""
        journal = self._log.journal
        if not journal.is_synced:
            try:
                journal.sync()
            except OSError:
                self.distrust()
                raise

    def distrust(self) -> None:
        """Trust no block any more, after a failed sync.

        Earlier writes may be lost, and no later sync would report that. So every block is verified
        when it is read, by this process and after a restart.
        """
        self._has_lost_a_sync = True
        self._log.distrust()

    # -- compaction --------------------------------------------------------------------------------

    @property
    def compact_floor(self) -> int:
        """Number of dead records below which the journal is not compacted."""
        return self._log.compact_floor

    @compact_floor.setter
    def compact_floor(self, num_records: int) -> None:
        self._log.compact_floor = num_records

    def compact_if_due(self) -> None:
        """Continue a compaction, or begin one if enough records are dead."""
        generation = self.superblock.generation + 1
        if self._log.compact_if_due(self.superblock.slab_id, generation):
            self._write_generation(generation)

    def _write_generation(self, generation: int) -> None:
        try:
            self._write_superblock(generation=generation)
        except OSError as error:
            logger.warning("superblock not written path=%s error=%s", self.folder, error)

    def compact(self) -> None:
        """Compact the whole journal now. Other threads may use the slab meanwhile."""
        generation = self.superblock.generation + 1
        self._log.compact(self.superblock.slab_id, generation)
        self._write_superblock(generation=generation)

    def mend(self) -> None:
        """Compact the journal if it can't be appended to. Raise ``OSError`` on failure."""
        if self._log.journal.is_broken:
            self.compact()

    def reserve(self) -> None:
        """Reserve space for the journal to grow, and for its successor."""
        self._log.reserve()

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
            journal_bytes=self._log.journal.num_bytes,
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
        if self._log.journal.is_broken or self._has_lost_a_sync:
            return False
        try:
            data = mark_of(self._system.stamp(self.data_fd))
            self._system.sync(self.data_fd)
            self._log.drop_compaction()
            self._log.journal.sync()
            write_trust(
                self.folder, self._log.trusted, self._log.rows, self.superblock, self._system
            )
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
            self._log.close()
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
