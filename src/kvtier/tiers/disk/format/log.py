"""Journal of a slab, with the table of slots that results from it."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from kvtier.core.system.private_files import open_file
from kvtier.tiers.disk.format.compaction import SLICE_RECORDS, Compaction
from kvtier.tiers.disk.format.folder import JOURNAL, NEW_JOURNAL
from kvtier.tiers.disk.format.journal import (
    COMPACT_FLOOR,
    DUE_SHARE,
    PACE,
    STEP_RECORDS,
    Journal,
    make_spare,
    max_journal_bytes,
)
from kvtier.tiers.disk.format.records import RecordKind, Records, are_live, blank, seal
from kvtier.tiers.disk.recovery.recovery import Recovery
from kvtier.tiers.disk.system import DiskSystem

logger = logging.getLogger(__name__)

MAX_NAMESPACES = 0xFFFF
UNNAMED = 0
"""Number for namespaces without a number of their own, after all are used."""

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Log:
    """Journal of a slab, and the table of slots that results from it.

    A thread that changes slots holds the lock ``changes`` from its lookup to the append. The lock
    ``_table`` is held for short memory accesses only, so no lookup waits for a disk or a
    compaction. One thread at a time runs compactions.

    Args:
        folder: directory of the slab.
        journal: the open journal.
        found: state recovered from the journal.
        trusted: bool [num_slots], slots whose data needs no verification.
        system: calls to the operating system.
    """

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        found: Recovery,
        trusted: Bools,
        system: DiskSystem,
    ) -> None:
        self.rows = found.rows
        self.trusted = trusted
        self.journal = journal
        self.changes = Lock()
        self.compact_floor = COMPACT_FLOOR
        self._folder = folder
        self._system = system
        self._table = Lock()
        self._names = {digest: number for number, digest in found.namespaces.items()}
        self._last_number = max(found.last_number, *found.namespaces, 0)
        self._num_live = found.rows.num_live()
        self._compaction: Compaction | None = None
        self._is_compacting = False
        self._num_seen = 0

    @property
    def num_dead(self) -> int:
        """Number of superseded records in the journal."""
        return self.journal.num_records - self._num_live - len(self._names) - 1

    # -- content of the slots ----------------------------------------------------------------------

    def look_up(self, slots: Int64s) -> tuple[Records, Bools]:
        """Return the slots' records, with the fields of ``SlotRows``, and which are trusted."""
        with self._table:
            return self.rows.of(slots), self.trusted[slots]

    def unchanged(self, seen: Records) -> Int64s:
        """Return the slots that were not rewritten since their record was seen."""
        slots = seen["slot"].astype(np.int64)
        return np.asarray(slots[self.rows.seqs(slots) == seen["seq"]], np.int64)

    def trust(self, seen: Records) -> None:
        """Mark the slots with these records as verified, unless they were rewritten."""
        with self._table:
            self.trusted[self.unchanged(seen)] = True

    def distrust(self) -> None:
        """Trust no slot any more."""
        with self._table:
            self.trusted[:] = False

    def append(self, records: Records, trusted: Int64s | None = None) -> None:
        """Append ``records``, and make them the deciding ones. The caller holds ``changes``.

        Raises ``OSError`` without any effect if they can't be written.

        trusted: slots whose data needs no verification.
        """
        seal(records)
        self.journal.append(records)
        records = records[records["kind"] != RecordKind.NAMESPACE]
        before = are_live(self.rows.kinds[records["slot"]])
        self._num_live += int(are_live(records["kind"]).sum()) - int(before.sum())
        with self._table:
            self.rows.set(records)
            if trusted is not None:
                self.trusted[trusted] = True

    # -- namespaces --------------------------------------------------------------------------------

    def number(self, namespace: bytes) -> tuple[int, Records]:
        """Return the namespace's number, and a record that assigns it if it is new.

        The caller holds ``changes``, appends the record, and then calls ``named``.
        """
        number = self._names.get(namespace)
        if number is not None or self._last_number >= MAX_NAMESPACES:
            return number or UNNAMED, blank(0, RecordKind.NAMESPACE)
        naming = blank(1, RecordKind.NAMESPACE)
        naming["namespace"] = self._last_number + 1
        naming["key"] = np.frombuffer(namespace, "V32")
        return self._last_number + 1, naming

    def named(self, namespace: bytes, number: int) -> None:
        """Note that the record returned by ``number`` was appended."""
        self._names[namespace] = self._last_number = number

    # -- compaction --------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Reserve space for the journal to grow, and for its successor.

        A slab works without this space, until the file system is full.
        """
        try:
            self.journal.reserve(max_journal_bytes(len(self.rows)))
            make_spare(self._folder, len(self.rows), self._system)
        except OSError as error:
            logger.warning("no room reserved for the journal path=%s error=%s", self._folder, error)

    def compact_if_due(self, slab_id: bytes, generation: int) -> bool:
        """Continue a running compaction, or begin one if enough records are dead.

        Called after every stored batch. Each call copies ``STEP_RECORDS`` records, or more after a
        large batch.

        Returns whether the journal was replaced by a new one of generation ``generation``.
        """
        if self._is_compacting or self.journal.is_broken:
            return False
        is_due = self.num_dead > max(DUE_SHARE * self._num_live, self.compact_floor)
        if not is_due and self._compaction is None:
            return False
        if self._compaction is None:
            self._num_seen = self.journal.num_records
        num_records = max(STEP_RECORDS, PACE * (self.journal.num_records - self._num_seen))
        try:
            return self._go_on(num_records, slab_id, generation)
        except OSError as error:
            self.compact_floor = 2 * self.num_dead  # do not retry with every batch
            logger.warning("journal not compacted path=%s error=%s", self._folder, error)
            return False
        finally:
            self._num_seen = self.journal.num_records

    def compact(self, slab_id: bytes, generation: int) -> None:
        """Copy the deciding records to a new journal, and replace the old one by it.

        Other threads may append meanwhile; their records are copied, too.
        """
        self.drop_compaction()
        while not self._go_on(self.journal.num_records, slab_id, generation):
            pass

    def _go_on(self, num_records: int, slab_id: bytes, generation: int) -> bool:
        """Copy ``num_records`` records of the old journal.

        If few records are left, finish the compaction, and return True. After an error the old
        journal stays in use.
        """
        self._is_compacting = True
        try:
            going = self._compaction = self._compaction or self._begin(slab_id, generation)
            going.copy(num_records)
            going.name(self._names)
            going.fresh.sync()
            if going.num_left > SLICE_RECORDS:
                return False
            self._switch(going)
        except Exception:
            self.drop_compaction()
            raise
        finally:
            self._is_compacting = False
        self._spare()
        return True

    def _begin(self, slab_id: bytes, generation: int) -> Compaction:
        fd = open_file(self._folder / NEW_JOURNAL, os.O_RDWR | os.O_CREAT)
        fresh = Journal(fd, 0, self._system)
        try:
            if os.fstat(fd).st_size:  # truncating an empty file would free the reserved space
                self._system.truncate(fd, 0)
            with contextlib.suppress(OSError):
                fresh.reserve(max_journal_bytes(len(self.rows)))
            with self.changes:  # so that each record is either in the table, or after the mark
                return Compaction(self.journal, fresh, self.rows, slab_id, generation)
        except BaseException:
            fresh.close()
            raise

    def _switch(self, going: Compaction) -> None:
        """Replace the old journal by the new one. Changes wait meanwhile; lookups don't."""
        with self.changes:
            going.copy(going.num_left)
            lost = going.missing()
            if len(lost):
                going.fresh.append(lost)
                logger.warning("journal was damaged path=%s num=%d", self._folder, len(lost))
            going.name(self._names)
            if not going.fresh.is_synced:
                going.fresh.sync()
            self._replace_journal(going.fresh)
            self._compaction = None
            if len(lost):
                with self._table:
                    self.rows.set(lost)
            used = going.is_used
            self._names = {digest: each for digest, each in self._names.items() if used[each]}
            self._last_number = max(self._names.values(), default=0)

    def _replace_journal(self, fresh: Journal) -> None:
        try:
            self._system.replace(self._folder / NEW_JOURNAL, self._folder / JOURNAL)
        except OSError as error:
            # It is unknown which of the two journals the next owner will see.
            self.journal.give_up(error)
            raise
        self.journal.close()
        self.journal = fresh

    def drop_compaction(self) -> None:
        """Discard an unfinished new journal."""
        going, self._compaction = self._compaction, None
        if going is not None:
            going.fresh.close()
            self._spare()

    def _spare(self) -> None:
        with contextlib.suppress(OSError):
            make_spare(self._folder, len(self.rows), self._system)

    def close(self) -> None:
        """Close the files."""
        if self._compaction is not None:
            self._compaction.fresh.close()
        self.journal.close()
