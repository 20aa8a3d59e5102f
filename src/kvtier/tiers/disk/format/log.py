"""A slab's journal, and in memory what it says of every slot."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from kvtier.system.private_files import open_file
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
"""Number of the namespaces that did not get one of their own."""

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Log:
    """Whoever changes something holds ``changes`` while it looks and appends.

    ``_table`` is held for memory only, and for bounded pieces of it: no look-up waits for a disk,
    or for a compaction.

    Compactions belong to one thread at a time.

    found: what the journal says. trusted: bool [num_slots], whose data may be believed unverified.
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
        """Records of the journal that say nothing any more."""
        return self.journal.num_records - self._num_live - len(self._names) - 1

    # -- what is in the slots ----------------------------------------------------------------------

    def look_up(self, slots: Int64s) -> tuple[Records, Bools]:
        """The slots' records, as far as ``Rows`` has them, and which are trusted."""
        with self._table:
            return self.rows.of(slots), self.trusted[slots]

    def unchanged(self, seen: Records) -> Int64s:
        """Slots that have not been rewritten since their record was seen."""
        slots = seen["slot"].astype(np.int64)
        return np.asarray(slots[self.rows.seqs(slots) == seen["seq"]], np.int64)

    def trust(self, seen: Records) -> None:
        """The data of the slots with these records was verified."""
        with self._table:
            self.trusted[self.unchanged(seen)] = True

    def distrust(self) -> None:
        """Nothing is trusted any more."""
        with self._table:
            self.trusted[:] = False

    def append(self, records: Records, trusted: Int64s | None = None) -> None:
        """``records`` decide from now on.

        ``OSError``, and nothing has changed, where they can't be written. trusted: slots whose data
        may be believed. The caller holds ``changes``.
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
        """The namespace's number, and the record that gives it one where it has none yet.

        To be appended, and ``named``. The caller holds ``changes``.
        """
        number = self._names.get(namespace)
        if number is not None or self._last_number >= MAX_NAMESPACES:
            return number or UNNAMED, blank(0, RecordKind.NAMESPACE)
        naming = blank(1, RecordKind.NAMESPACE)
        naming["namespace"] = self._last_number + 1
        naming["key"] = np.frombuffer(namespace, "V32")
        return self._last_number + 1, naming

    def named(self, namespace: bytes, number: int) -> None:
        """The record that ``number`` gave was appended."""
        self._names[namespace] = self._last_number = number

    # -- compaction --------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Have room for the journal to grow, and for the next one.

        A slab without it can be used: it stops being written when the file system is full.
        """
        try:
            self.journal.reserve(max_journal_bytes(len(self.rows)))
            make_spare(self._folder, len(self.rows), self._system)
        except OSError as error:
            logger.warning("no room reserved for the journal path=%s error=%s", self._folder, error)

    def compact_if_due(self, slab_id: bytes, generation: int) -> bool:
        """Begin a compaction if nearly as many records are dead as live; go on with a running one.

        There must be enough to be worth it. Called with every batch that is stored, each of which
        pays for a part: ``STEP_RECORDS``, or more for a large one.

        Returns whether the journal is a new one now, of that generation.
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
            self.compact_floor = 2 * self.num_dead  # not again with every batch
            logger.warning("journal not compacted path=%s error=%s", self._folder, error)
            return False
        finally:
            self._num_seen = self.journal.num_records

    def compact(self, slab_id: bytes, generation: int) -> None:
        """Write what counts to a new journal and put it in place of the old one, all at once.

        Others may go on: what they append meanwhile is in the new one, too.
        """
        self.drop_compaction()
        while not self._go_on(self.journal.num_records, slab_id, generation):
            pass

    def _go_on(self, num_records: int, slab_id: bytes, generation: int) -> bool:
        """Copy that many records of the old journal.

        The new one takes its place when hardly any are left: True then. What raises leaves the old
        one.
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
            if os.fstat(fd).st_size:  # where nothing is, cutting would give the room back
                self._system.truncate(fd, 0)
            with contextlib.suppress(OSError):
                fresh.reserve(max_journal_bytes(len(self.rows)))
            with self.changes:  # what was appended decides by now, or comes after the mark
                return Compaction(self.journal, fresh, self.rows, slab_id, generation)
        except BaseException:
            fresh.close()
            raise

    def _switch(self, going: Compaction) -> None:
        """The new journal in place of the old one. Nothing is changed meanwhile; it may be read."""
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
            # Which of the two the next owner will see is not known.
            self.journal.give_up(error)
            raise
        self.journal.close()
        self.journal = fresh

    def drop_compaction(self) -> None:
        """Discard what was written of a new journal."""
        going, self._compaction = self._compaction, None
        if going is not None:
            going.fresh.close()
            self._spare()

    def _spare(self) -> None:
        with contextlib.suppress(OSError):
            make_spare(self._folder, len(self.rows), self._system)

    def close(self) -> None:
        """Give the files back as they are."""
        if self._compaction is not None:
            self._compaction.fresh.close()
        self.journal.close()
