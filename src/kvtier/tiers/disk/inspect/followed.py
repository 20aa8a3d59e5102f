"""Read-only view of a slab that another process writes, by following its journal."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.core.errors import CacheError, ConfigError
from kvtier.core.hot import SlotTable
from kvtier.core.system.private_files import open_file
from kvtier.tiers.disk.format.folder import DATA, JOURNAL, open_data
from kvtier.tiers.disk.format.journal import read_records
from kvtier.tiers.disk.format.records import RECORD_BYTES, RecordKind, Records, are_valid
from kvtier.tiers.disk.format.superblock import Superblock
from kvtier.tiers.disk.opening import read_superblock
from kvtier.tiers.disk.recovery.recovery import PIECE_RECORDS, Recovery

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class FollowedSlab:
    """Files of a slab, opened for reading. One thread uses it.

    The writer records in the journal that a slot is empty *before* it writes other data there. So
    bytes that were read from a slot match its record if, after a further ``read_on``, that record
    is still the deciding one. The two processes need no lock.

    Raises ``OSError`` and ``CacheError`` if the files can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.superblock: Superblock = read_superblock(folder)[0]
        with contextlib.ExitStack() as undo:
            self.data_fd, self.is_direct = open_data(folder / DATA, os.O_RDONLY)
            undo.callback(os.close, self.data_fd)
            self._journal_fd = open_file(folder / JOURNAL, os.O_RDONLY)
            undo.callback(os.close, self._journal_fd)
            self._found = Recovery(self.superblock.num_slots)
            self._slots = SlotTable(self._found.rows.keys, np.zeros(0, np.int64))
            self._at = 0
            self.read_on()
            if self._found.slab_id not in (None, self.superblock.slab_id):
                raise ConfigError(f"disk tier: {folder} has the journal of another slab")
            undo.pop_all()

    @property
    def is_current(self) -> bool:
        """Whether the open journal is still the slab's journal.

        A compaction replaces it, and a slab may be deleted and made again.
        """
        try:
            now = (self._folder / JOURNAL).stat()
        except OSError:
            return False
        own = os.fstat(self._journal_fd)
        return os.path.samestat(now, own) and own.st_size >= self._at

    def read_on(self) -> None:
        """Apply the records that were appended since the last call.

        Invalid records at the end are left for the next call, because they may be incomplete. An
        invalid record that is followed by a valid one is damaged, and skipped.
        """
        while True:
            records = read_records(self._journal_fd, self._at, PIECE_RECORDS)
            whole = np.flatnonzero(are_valid(records))
            if not len(whole):
                return
            num = int(whole[-1]) + 1
            self._take(records[:num])
            self._at += num * RECORD_BYTES

    def _take(self, records: Records) -> None:
        rows = self._found.rows
        slots = np.unique(records["slot"][records["slot"] < len(rows)]).astype(np.int64)
        self._slots.remove(slots)  # while the rows still have the old keys
        self._found.add(records)
        self._slots.put(slots[rows.kinds[slots] == RecordKind.PUT])

    def find(self, keys: Records) -> Int64s:
        """Return the slot of each key: int64 [n]; -1 for none."""
        return self._slots.find(keys)

    def records_of(self, slots: Int64s) -> Records:
        """Return the deciding records of the slots; see ``SlotRows.of``."""
        return self._found.rows.of(slots)

    def still_decide(self, records: Records) -> Bools:
        """Return which of the records are still the deciding ones: bool [n]."""
        return self._found.rows.decide(records)

    def forget(self, slots: Int64s) -> None:
        """Forget slots whose bytes are wrong, until the writer records something new for them."""
        self._slots.remove(slots)

    def close(self) -> None:
        os.close(self.data_fd)
        os.close(self._journal_fd)


def follow(folder: Path) -> FollowedSlab | None:
    """Open the slab in ``folder``; return None if there is none that can be read."""
    try:
        return FollowedSlab(folder)
    except (CacheError, OSError):
        return None
