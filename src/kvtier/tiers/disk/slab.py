"""An open slab: its files, and the record that decides about each slot."""

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
import numpy.typing as npt

from kvtier.tiers.disk.folder import (
    JOURNAL,
    NEW_JOURNAL,
    OwnerLock,
    open_file,
)
from kvtier.tiers.disk.journal import COMPACT_FLOOR, Journal, make_spare, max_journal_bytes
from kvtier.tiers.disk.records import Kind, Records, blank, header, seal
from kvtier.tiers.disk.replay import Replay
from kvtier.tiers.disk.sequence import Sequence
from kvtier.tiers.disk.superblock import (
    FORMAT_VERSION,
    HALF_BYTES,
    DataMark,
    Membership,
    Superblock,
)
from kvtier.tiers.disk.system import DiskSystem
from kvtier.tiers.disk.trust import mark_of, write_trust

logger = logging.getLogger(__name__)

MAX_NAMESPACES = 0xFFFF
MAX_U32 = 0xFFFFFFFF
UNNAMED = 0
"""Number of the namespaces that did not get one of their own."""

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


class Slab:
    """Made by ``opening.open_slab``. Safe to use from several threads, but for ``compact`` and
    ``close``; changes raise ``OSError`` where the system refuses, and have not happened then, and
    ``Closed`` in a forked child.

    Each change is in the journal first and in ``_table`` then; what was appended is read back by
    the next owner, and nothing else is.

    found: what the journal says. trusted: bool [num_slots], whose data may be believed unverified.
    numbers: gives the records their sequence numbers; the slabs of a set share one.
    """

    def __init__(
        self,
        folder: Path,
        lock: OwnerLock,
        superblock: Superblock,
        found: Replay,
        files: SlabFiles,
        trusted: Bools,
        system: DiskSystem,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.superblock = superblock
        self.data_fd, self.is_direct = files.data_fd, files.is_direct
        self.compact_floor = COMPACT_FLOOR
        self._superblock_fd = files.superblock_fd
        self._owner = lock
        self._system = system
        self._clock = clock
        self._lock = Lock()
        self._table = found.table
        self._trusted = trusted
        self._has_lost_a_sync = False
        self._numbers = {digest: number for number, digest in found.namespaces.items()}
        self._last_number = int(found.table["namespace"].max(initial=0))
        self._last_number = max(self._last_number, *found.namespaces, 0)
        self._num_live = int(np.isin(found.table["kind"], (Kind.PUT, Kind.BAD)).sum())
        self.numbers = Sequence(found.next_seq)
        self._journal = Journal(files.journal_fd, files.journal_bytes, system)
        self._since_snapshot: list[Records] | None = None

    # -- queries -----------------------------------------------------------------------------------

    @property
    def table(self) -> Records:
        """``RECORD`` [num_slots]: of each slot the record that decides. To look at when nothing
        else uses the slab."""
        return self._table

    @property
    def num_dead(self) -> int:
        """Records of the journal that say nothing any more."""
        return self._journal.num_records - self._num_live - len(self._numbers) - 1

    @property
    def journal_bytes(self) -> int:
        return self._journal.num_bytes

    def look_up(self, slots: Int64s) -> tuple[Records, Bools]:
        """Copies of the slots' records, and whether their data may be believed unverified."""
        with self._lock:
            return self._table[slots], self._trusted[slots]

    def trust(self, seen: Records) -> None:
        """The data of the slots with these records was verified."""
        with self._lock:
            self._trusted[self._unchanged(seen)] = True

    def _unchanged(self, seen: Records) -> Int64s:
        """Slots that have not been rewritten since their record was seen."""
        slots = seen["slot"].astype(np.int64)
        return np.asarray(slots[self._table["seq"][slots] == seen["seq"]], np.int64)

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
        """The slots hold these blocks: their data has been written.

        numbers: uint64 [n], sequence numbers that were taken before the data was written. Where
        something was said about a slot since (it can't be read, for instance) that stays: False.
        """
        with self._lock:
            is_newest: Bools = np.asarray(self._table["seq"][slots] < numbers)
            keys, depths, slots = keys[is_newest], depths[is_newest], slots[is_newest]
            number, naming = self._number(namespace)
            records = blank(len(slots), Kind.PUT)
            records["namespace"] = number
            records["slot"] = slots
            records["depth"] = np.minimum(depths, MAX_U32)
            records["time"] = self._now()
            records["data_crc"] = data_crcs[is_newest]
            records["key"] = keys
            records["seq"] = numbers[is_newest]
            self._append(np.concatenate([naming, records]))
            if len(naming):
                self._numbers[namespace] = self._last_number = number
            self._trusted[slots] = True
            return is_newest

    def delete(self, slots: Int64s) -> None:
        """The slots hold nothing. Those that hold nothing anyway cost no record."""
        with self._lock:
            slots = slots[self._table["kind"][slots] == Kind.PUT]
            self._append(self._about(slots, Kind.DEL))

    def delete_if_unchanged(self, seen: Records) -> Int64s:
        """Slots whose record is still the one that was ``seen`` hold nothing; returns them."""
        with self._lock:
            slots: Int64s = self._unchanged(seen)
            self._append(self._about(slots, Kind.DEL))
            return slots

    def mark_bad(self, slots: Int64s) -> None:
        """The slots can't be read or written. Where even this can't be written, only this process
        knows."""
        with self._lock:
            self._append(self._about(slots, Kind.BAD))

    def _about(self, slots: Int64s, kind: Kind) -> Records:
        records = blank(len(slots), kind)
        records["slot"] = slots
        records["time"] = self._now()
        records["seq"] = self.numbers.take(len(records))
        return records

    def _now(self) -> int:
        """Unix time, as far as 32 bits count it."""
        return min(max(0, int(self._clock())), MAX_U32)

    def _number(self, namespace: bytes) -> tuple[int, Records]:
        """The namespace's number, and the record that gives it one where it has none yet."""
        number = self._numbers.get(namespace)
        if number is not None or self._last_number >= MAX_NAMESPACES:
            return number or UNNAMED, blank(0, Kind.NAMESPACE)
        naming = blank(1, Kind.NAMESPACE)
        naming["namespace"] = self._last_number + 1
        naming["key"] = np.frombuffer(namespace, "V32")
        naming["seq"] = self.numbers.take(1)
        return self._last_number + 1, naming

    def _append(self, records: Records) -> None:
        if not len(records):
            return
        self._owner.process.must_be_here("the slab")
        seal(records)
        self._journal.append(records)
        if self._since_snapshot is not None:
            self._since_snapshot.append(records)
        self._apply(records)

    def _apply(self, records: Records) -> None:
        records = records[records["kind"] != Kind.NAMESPACE]
        slots = records["slot"]
        self._num_live -= int(np.isin(self._table["kind"][slots], (Kind.PUT, Kind.BAD)).sum())
        self._table[slots] = records
        self._num_live += int(np.isin(records["kind"], (Kind.PUT, Kind.BAD)).sum())

    def sync_journal(self) -> None:
        """Return when the journal is on the medium."""
        if not self._journal.is_synced:
            try:
                self._journal.sync()
            except OSError:
                self.distrust()
                raise

    def distrust(self) -> None:
        """A sync has failed: what was written before it may be lost, and no later sync says so.
        Every block is verified when it is read, and a restart believes nothing of this one."""
        with self._lock:
            self._has_lost_a_sync = True
            self._trusted[:] = False

    # -- compaction --------------------------------------------------------------------------------

    def compact_if_due(self) -> None:
        """Compact when more records are dead than live, and enough to be worth it."""
        if self.num_dead <= max(self._num_live, self.compact_floor) or self._journal.is_broken:
            return
        try:
            self.compact()
        except OSError as error:
            self.compact_floor = 2 * self.num_dead  # not again with every batch
            logger.warning("journal not compacted path=%s error=%s", self.folder, error)

    def mend(self) -> None:
        """Write the journal anew if nothing can be appended to it; ``OSError`` where that fails."""
        if self._journal.is_broken:
            self.compact()

    def reserve(self) -> None:
        """Have room for the journal to grow, and for the next one. A slab without it can be used:
        it stops being written when the file system is full."""
        try:
            self._journal.reserve(max_journal_bytes(len(self._table)))
            make_spare(self.folder, len(self._table), self._system)
        except OSError as error:
            logger.warning("no room reserved for the journal path=%s error=%s", self.folder, error)

    def compact(self) -> None:
        """Write what counts to a new journal and put it in place of the old one.

        Others may go on: what they append meanwhile goes to both.
        """
        with self._lock:
            generation = self.superblock.generation + 1
            snapshot = self._snapshot(generation)
            self._since_snapshot = []
        fd = -1
        try:
            fd = open_file(self.folder / NEW_JOURNAL, os.O_RDWR | os.O_CREAT)
            fresh = Journal(fd, 0, self._system)
            if os.fstat(fd).st_size:  # where nothing is, cutting would give the room back
                self._system.truncate(fd, 0)
            with contextlib.suppress(OSError):
                fresh.reserve(max_journal_bytes(len(self._table)))
            fresh.append(snapshot)
            fresh.sync()
            with self._lock:
                if self._since_snapshot:
                    fresh.append(np.concatenate(self._since_snapshot))
                    fresh.sync()
                self._replace_journal(fresh)
                fd = -1
        finally:
            with self._lock:
                self._since_snapshot = None
            if fd >= 0:
                os.close(fd)
            with contextlib.suppress(OSError):
                make_spare(self.folder, len(self._table), self._system)
        self._write_superblock(generation=generation)

    def _replace_journal(self, fresh: Journal) -> None:
        try:
            self._system.replace(self.folder / NEW_JOURNAL, self.folder / JOURNAL)
        except OSError as error:
            # Which of the two the next owner will see is not known.
            self._journal.give_up(error)
            raise
        self._journal.close()
        self._journal = fresh

    def _snapshot(self, generation: int) -> Records:
        """A header, the namespaces in use, and of each slot the record that decides."""
        kept = self._table[np.isin(self._table["kind"], (Kind.PUT, Kind.BAD))]
        kept = kept[np.argsort(kept["seq"], kind="stable")]
        used = set(np.unique(kept["namespace"]).tolist())
        self._numbers = {
            digest: number for digest, number in self._numbers.items() if number in used
        }
        self._last_number = max(self._numbers.values(), default=0)
        naming = blank(len(self._numbers), Kind.NAMESPACE)
        naming["namespace"] = list(self._numbers.values())
        for record, digest in zip(naming, self._numbers, strict=True):
            record["key"] = digest
        top = np.concatenate([header(self.superblock.slab_id, generation), naming])
        seal(top)
        return np.concatenate([top, kept])

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
        """From now on a restart that finds no clean close verifies before it believes. member: what
        the slab's set is from now on."""
        self._write_superblock(member=member)

    def settle(self, member: Membership) -> bool:
        """Have everything on the medium, and say so: the next owner believes what this one wrote,
        verified, or was told to believe. Nothing is written any more. False where that failed."""
        if not self._owner.process.is_here:
            return False  # the owner goes on
        if self._journal.is_broken or self._has_lost_a_sync:
            return False
        try:
            data = mark_of(self._system.stamp(self.data_fd))
            self._system.sync(self.data_fd)
            self._journal.sync()
            write_trust(self.folder, self._trusted, self._table, self.superblock, self._system)
            self._write_superblock(member=member, is_clean=True, data=data)
        except OSError as error:
            logger.warning("slab not closed in order path=%s error=%s", self.folder, error)
            return False
        return True

    def advance(self, member: Membership) -> None:
        """After ``settle``: the other slabs of the set are settled, too."""
        try:
            self._write_superblock(member=member, is_clean=True, data=self.superblock.data)
        except OSError as error:
            logger.warning("slab not closed in order path=%s error=%s", self.folder, error)

    def close(self, clean: bool = True) -> None:
        """Give the files back. clean: ``settle`` before."""
        try:
            if clean:
                self.settle(self.superblock.member)
        finally:
            os.close(self.data_fd)
            os.close(self._superblock_fd)
            self._journal.close()
            self._owner.close()


@dataclasses.dataclass(frozen=True, slots=True)
class SlabFiles:
    """Open files of a slab. is_direct: blocks go past the page cache."""

    data_fd: int
    is_direct: bool
    superblock_fd: int
    journal_fd: int
    journal_bytes: int


def write_superblock(fd: int, superblock: Superblock, system: DiskSystem) -> None:
    """Over the older of the two, and wait until it is on the medium."""
    system.write_at(fd, superblock.encode(), superblock.epoch % 2 * HALF_BYTES)
    system.sync(fd)
