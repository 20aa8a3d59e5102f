"""The journal file. Records are appended, never changed."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import numpy as np

from kvtier.core.system.private_files import open_file
from kvtier.tiers.disk.format.folder import NEW_JOURNAL
from kvtier.tiers.disk.format.records import RECORD, RECORD_BYTES, Records
from kvtier.tiers.disk.system import DiskSystem

COMPACT_FLOOR = 4096
"""Number of dead records (256 KiB) below which a journal is not compacted."""
DUE_SHARE = 7 / 8
"""Dead records per live one above which a journal is compacted. The reserved space allows as many
dead records as live ones, so records that are appended meanwhile still fit."""
STEP_RECORDS = 1 << 16
"""Minimum number of records, 4 MiB, that are compacted after each batch of writes."""
PACE = 32
"""Minimum number of records that are compacted per appended record. With twice as many records as
slots to copy, a compaction ends before a sixteenth as many records as slots are appended."""
SLACK_RECORDS = 4096
"""Further records that a journal may hold: a last batch and names of namespaces."""


def max_journal_bytes(num_slots: int) -> int:
    """Return the largest size of a journal that is compacted on time; this space is reserved."""
    return RECORD_BYTES * (num_slots + max(num_slots, COMPACT_FLOOR) + SLACK_RECORDS)


class Journal:
    """An open journal that ends at ``num_bytes``. The holder of the slab's lock owns it."""

    def __init__(self, fd: int, num_bytes: int, system: DiskSystem) -> None:
        self.num_bytes = num_bytes
        self._synced_bytes = 0
        self._reserved_bytes = 0
        self._fd = fd
        self._system = system
        self._broken: OSError | None = None

    @property
    def is_synced(self) -> bool:
        """Whether all records are on the medium."""
        return self._synced_bytes == self.num_bytes

    @property
    def num_records(self) -> int:
        return self.num_bytes // RECORD_BYTES

    @property
    def is_broken(self) -> bool:
        """Whether the content of the file is unknown, so that nothing can be appended."""
        return self._broken is not None

    def reserve(self, num_bytes: int) -> None:
        """Reserve space to grow to ``num_bytes``, even if the file system gets full.

        Raises ``OSError`` if there is too little; the journal still works then.
        """
        self._system.reserve_ahead(self._fd, num_bytes)
        self._reserved_bytes = num_bytes

    def append(self, records: Records) -> None:
        """Append all of the records, or raise ``OSError`` and append none."""
        if self._broken:
            raise OSError(errno.EIO, f"the journal can't be written: {self._broken}")
        data = records.tobytes()
        try:
            self._system.write_at(self._fd, data, self.num_bytes)
        except OSError:
            self._cut()
            raise
        self.num_bytes += len(data)

    def read(self, start: int, end: int) -> Records:
        """Return records ``start`` to ``end``, unverified; fewer if the file ends before."""
        return read_records(self._fd, start * RECORD_BYTES, end - start)

    def skip_hole(self, number: int) -> int:
        """Return the number of the first record, from ``number`` on, that is not in a hole."""
        try:
            at = os.lseek(self._fd, number * RECORD_BYTES, os.SEEK_DATA)
        except OSError as error:
            return self.num_records if error.errno == errno.ENXIO else number
        return max(number, at // RECORD_BYTES)

    def _cut(self) -> None:
        """Truncate the remains of a failed append, which a restart would apply."""
        try:
            self._system.truncate(self._fd, self.num_bytes)
        except OSError as error:
            self.give_up(error)
            return
        with contextlib.suppress(OSError):  # the truncation has freed the reserved space
            self._system.reserve_ahead(self._fd, self._reserved_bytes)

    def sync(self) -> None:
        """Wait until all records are on the medium."""
        before = self.num_bytes
        try:
            self._system.sync(self._fd)
        except OSError as error:
            # The kernel reports a lost write once, and then forgets about it.
            self.give_up(error)
            raise
        self._synced_bytes = before

    def give_up(self, error: OSError) -> None:
        """Refuse all further appends."""
        self._broken = error

    def close(self) -> None:
        os.close(self._fd)


def read_records(fd: int, offset: int, num_records: int) -> Records:
    """Read up to ``num_records`` whole records at ``offset``; fewer only at the file's end."""
    records = np.empty(num_records, RECORD)
    view = memoryview(records.view(np.uint8).data)
    done = 0
    while done < len(view) and (got := os.preadv(fd, [view[done:]], offset + done)):
        done += got
    return records[: done // RECORD_BYTES]


def make_spare(folder: Path, num_slots: int, system: DiskSystem) -> None:
    """Create an empty file with reserved space for the next journal.

    So a journal can be compacted on a full file system. The remains of an interrupted compaction
    are removed.
    """
    path = folder / NEW_JOURNAL
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_size or not path.is_file():
            path.unlink()
    fd = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        system.reserve_ahead(fd, max_journal_bytes(num_slots))
    finally:
        os.close(fd)
