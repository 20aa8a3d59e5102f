"""The journal's file: records are appended, never changed."""

from __future__ import annotations

import errno
import os

from kvtier.tiers.disk.records import RECORD_BYTES, Records
from kvtier.tiers.disk.system import DiskSystem


class Journal:
    """An open journal that ends at ``num_bytes``. Owned by who holds the slab's lock."""

    def __init__(self, fd: int, num_bytes: int, system: DiskSystem) -> None:
        self.num_bytes = num_bytes
        self._synced_bytes = 0
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
        """What is in the file is not known any more; nothing is appended to it."""
        return self._broken is not None

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

    def _cut(self) -> None:
        """Take back what of a failed append is there: it would count after a restart."""
        try:
            self._system.truncate(self._fd, self.num_bytes)
        except OSError as error:
            self.give_up(error)

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
