"""The journal's file: records are appended, never changed."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import numpy as np

from kvtier.system.private_files import open_file
from kvtier.tiers.disk.format.folder import NEW_JOURNAL
from kvtier.tiers.disk.format.records import RECORD, RECORD_BYTES, Records
from kvtier.tiers.disk.system import DiskSystem

COMPACT_FLOOR = 4096
"""Dead records (256 KiB of them) below which a journal is left as it is."""
DUE_SHARE = 7 / 8
"""Dead records per live one above which a journal is compacted: what is appended meanwhile still
finds the room that is reserved for as many dead ones as live ones."""
STEP_RECORDS = 1 << 16
"""Records of the old journal, 4 MiB, that each batch of writes compacts at least."""
PACE = 32
"""And at least so many for each record that was appended since: with twice as many records as slots
to copy, a new journal is there before a sixteenth as many as slots are appended."""
SLACK_RECORDS = 4096
"""Records beyond the limit that a journal may hold: a last batch and names of namespaces."""


def max_journal_bytes(num_slots: int) -> int:
    """As large as a journal gets, if it is compacted when it is due: room for it is reserved."""
    return RECORD_BYTES * (num_slots + max(num_slots, COMPACT_FLOOR) + SLACK_RECORDS)


class Journal:
    """An open journal that ends at ``num_bytes``. Owned by who holds the slab's lock."""

    def __init__(self, fd: int, num_bytes: int, system: DiskSystem) -> None:
        self.num_bytes = num_bytes
        self._synced_bytes = 0
        self._reserved_bytes = 0
        self._fd = fd
        self._system = system
        self._broken: OSError | None = None

    @property
    def is_synced(self) -> bool:
        """All records are on the medium."""
        return self._synced_bytes == self.num_bytes

    @property
    def num_records(self) -> int:
        return self.num_bytes // RECORD_BYTES

    @property
    def is_broken(self) -> bool:
        """True if the content of the file is unknown; nothing is appended to it then."""
        return self._broken is not None

    def reserve(self, num_bytes: int) -> None:
        """Have room to grow to ``num_bytes``: up to there a full file system does not matter.

        ``OSError`` where there is none; the journal can be used as well.
        """
        self._system.reserve_ahead(self._fd, num_bytes)
        self._reserved_bytes = num_bytes

    def append(self, records: Records) -> None:
        """All of the records, or ``OSError`` and none of them."""
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
        """The records number ``start`` to ``end``, whatever is there now.

        Fewer where the file ends before.
        """
        return read_records(self._fd, start * RECORD_BYTES, end - start)

    def skip_hole(self, number: int) -> int:
        """The record from which on there may be content again, ``number`` where there is."""
        try:
            at = os.lseek(self._fd, number * RECORD_BYTES, os.SEEK_DATA)
        except OSError as error:
            return self.num_records if error.errno == errno.ENXIO else number
        return max(number, at // RECORD_BYTES)

    def _cut(self) -> None:
        """Take back what of a failed append is there: it would count after a restart."""
        try:
            self._system.truncate(self._fd, self.num_bytes)
        except OSError as error:
            self.give_up(error)
            return
        with contextlib.suppress(OSError):  # what was reserved behind the end went with it
            self._system.reserve_ahead(self._fd, self._reserved_bytes)

    def sync(self) -> None:
        """Return when all records are on the medium."""
        before = self.num_bytes
        try:
            self._system.sync(self._fd)
        except OSError as error:
            # The kernel reports a lost write once, and then forgets about it.
            self.give_up(error)
            raise
        self._synced_bytes = before

    def give_up(self, error: OSError) -> None:
        """Append nothing any more."""
        self._broken = error

    def close(self) -> None:
        os.close(self._fd)


def read_records(fd: int, offset: int, num_records: int) -> Records:
    """Up to ``num_records`` whole records from ``offset`` on; fewer only at the end of the file."""
    records = np.empty(num_records, RECORD)
    view = memoryview(records.view(np.uint8).data)
    done = 0
    while done < len(view) and (got := os.preadv(fd, [view[done:]], offset + done)):
        done += got
    return records[: done // RECORD_BYTES]


def make_spare(folder: Path, num_slots: int, system: DiskSystem) -> None:
    """Have an empty file with room for the next journal.

    A full file system does not keep a journal from being compacted. What a crash left of one is
    removed.
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
