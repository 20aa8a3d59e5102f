"""A slab that another process writes: its journal, read on as it grows."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier._hot import SlotTable
from kvtier.errors import CacheError, ConfigError
from kvtier.system.private_files import open_file
from kvtier.tiers.disk.format.folder import DATA, JOURNAL, open_data
from kvtier.tiers.disk.format.journal import read_records
from kvtier.tiers.disk.format.records import RECORD_BYTES, RecordKind, Records, are_valid
from kvtier.tiers.disk.format.superblock import Superblock
from kvtier.tiers.disk.opening import read_superblock
from kvtier.tiers.disk.recovery.recovery import PIECE_RECORDS, Recovery

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class FollowedSlab:
    """The files of a slab, open to read; one thread uses it.

    Raises ``OSError`` and ``CacheError`` where they can't be read.

    The writer says in the journal that a slot is empty *before* it writes other data there. So what
    was read from a slot is what its record says if that record decides still, after one more
    ``read_on``: no lock is needed between the two processes.
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
        """Whether the journal is the slab's still.

        It is written anew now and then, and a slab may be deleted and made again.
        """
        try:
            now = (self._folder / JOURNAL).stat()
        except OSError:
            return False
        own = os.fstat(self._journal_fd)
        return os.path.samestat(now, own) and own.st_size >= self._at

    def read_on(self) -> None:
        """Take in what was appended.

        A record that is not whole yet is left for the next time; one with others behind it is
        damaged, and passed over.
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
        self._slots.remove(slots)  # by the keys that they had
        self._found.add(records)
        self._slots.put(slots[rows.kinds[slots] == RecordKind.PUT])

    def find(self, keys: Records) -> Int64s:
        """int64 [n]: the slot of each key, -1 where there is none."""
        return self._slots.find(keys)

    def records_of(self, slots: Int64s) -> Records:
        """Return the deciding records of the slots; see ``Rows.of``."""
        return self._found.rows.of(slots)

    def still_decide(self, records: Records) -> Bools:
        """Bool [n]: which of the records decide still."""
        return self._found.rows.decide(records)

    def forget(self, slots: Int64s) -> None:
        """Forget slots whose bytes are wrong, until the writer records something new for them."""
        self._slots.remove(slots)

    def close(self) -> None:
        os.close(self.data_fd)
        os.close(self._journal_fd)


def follow(folder: Path) -> FollowedSlab | None:
    """The slab in ``folder``; None while there is none that can be read."""
    try:
        return FollowedSlab(folder)
    except (CacheError, OSError):
        return None
