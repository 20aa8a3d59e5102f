"""When to stop asking a disk."""

from __future__ import annotations

import errno
import logging
from threading import Lock
from typing import Final

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

MEDIUM_ERRORS: Final = (errno.EIO, errno.EBADMSG, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO)
"""Of the place on the medium, not of the moment: the slot is not used again."""
LATE: Final = (errno.ETIMEDOUT, errno.ETIME, errno.ECANCELED, errno.EINTR, errno.EAGAIN)
"""The disk was too slow, once: nothing is wrong with it."""


class Health:
    """Counts I/O errors in a row and switches the tier off.

    Reads, writes and the journal ("read", "write", "journal") are counted apart: a full disk may
    still be read.
    """

    def __init__(self, what: str, errors_until_off: int) -> None:
        self.reason = ""
        self._what = what
        self._limit = errors_until_off
        self._in_row: dict[str, int] = {"read": 0, "write": 0, "journal": 0}
        self._lock = Lock()

    @property
    def is_off(self) -> bool:
        return bool(self.reason)

    def note(self, direction: str, done: npt.NDArray[np.int64]) -> None:
        """What became of a batch: bytes or -errno per operation, in order."""
        if len(done) and done.min() >= 0:
            self.succeeded(direction)
            return
        counted = done[~np.isin(-done, LATE)]
        failed = counted < 0
        if not len(counted):
            return
        with self._lock:
            good = np.flatnonzero(~failed)
            in_row = len(failed) if not len(good) else len(failed) - 1 - int(good[-1])
            self._in_row[direction] = in_row + (0 if len(good) else self._in_row[direction])
            over = self._in_row[direction] >= self._limit
        if over:
            code = int(-counted[failed][-1])
            self.switch_off(
                f"{self._in_row[direction]} {direction} errors in a row, "
                f"the last: {errno.errorcode.get(code, str(code))}"
            )

    def failed(self, direction: str, error: OSError) -> None:
        """A call of its own failed: a record that could not be appended, for instance."""
        self.note(direction, np.array([-(error.errno or errno.EIO)], np.int64))

    def succeeded(self, direction: str) -> None:
        """The opposite of ``failed``: what comes next is the first in a row."""
        with self._lock:
            self._in_row[direction] = 0

    def switch_off(self, reason: str) -> None:
        """For good: a restart looks again."""
        with self._lock:
            if self.reason:
                return
            self.reason = reason
        logger.error("disk tier switched off path=%s reason=%s", self._what, reason)
