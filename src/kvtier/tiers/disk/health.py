"""Health of a disk, judged by its errors; decides when to stop using it for a while."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final

import numpy as np

from kvtier.tiers.breaker import Breaker
from kvtier.tiers.disk.arrays import Int64s

logger = logging.getLogger(__name__)

MEDIUM_ERRORS: Final = (errno.EIO, errno.EBADMSG, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO)
"""Errors of a location on the medium. The slot is not used again."""
LATE: Final = (errno.ETIMEDOUT, errno.ETIME, errno.ECANCELED)
"""Errors of a missed deadline. They concern a whole batch, so each batch counts once."""
NOTHING: Final = (errno.EINTR, errno.EAGAIN)
"""Errors that are no evidence against the disk."""
LATE_UNTIL_OPEN: Final = 3
"""Late batches in a row after which the breaker opens; the caller has waited for each."""


class DiskHealth:
    """Counts failures, and opens a breaker after several in a row. Thread-safe.

    The breaker opens after ``errors_until_open`` errors, or ``LATE_UNTIL_OPEN`` late batches.

    Args:
        what: name of the disk, for the log.
        kinds: kinds of operations, counted separately, in the order in which a call performs them.
            A call has succeeded when its last kind has.
        errors_until_open: errors in a row that open the breaker.
        clock: monotonic clock, in seconds.

    Attributes:
        breaker: open or half-open while no call has succeeded since it opened.
        num_opened: how often it opened.
    """

    def __init__(
        self,
        what: str,
        kinds: Sequence[str],
        errors_until_open: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reason = ""
        self.num_opened = 0
        self._what = what
        self._last_kind = kinds[-1]
        self._limit = errors_until_open
        self.breaker = Breaker(clock)
        self._in_row = dict.fromkeys(kinds, 0)
        self._late_in_row = dict.fromkeys(kinds, 0)
        self._lock = Lock()

    def state(self) -> str:
        """Describe why calls are refused; "" while they pass."""
        with self._lock:
            if not self.breaker.is_open:
                return ""
            left_s = self.breaker.left_s
            is_tried = self.breaker.is_tried
            then = "retry in progress" if is_tried else f"retry in {left_s:.0f} s"
            return f"{self.reason}; {then if left_s > 0 else 'retry with the next call'}"

    def note(self, kind: str, done: Int64s, is_patient: bool = True) -> None:
        """Record the outcome of a batch: bytes or -errno per operation, in order.

        is_patient: whether the disk had enough time, so that a late answer is evidence.
        """
        if not is_patient:
            done = done[~np.isin(-done, LATE)]
        if not len(done):
            return
        if done.min() >= 0:
            self.succeeded(kind)
            return
        is_late = bool(np.isin(-done, LATE).any())
        counted = done[~np.isin(-done, (*LATE, *NOTHING))]
        failed = counted < 0
        if not len(counted) and not is_late:
            return
        if not is_late and not failed.any():
            self.succeeded(kind)
            return
        with self._lock:
            if len(counted):
                good = np.flatnonzero(~failed)
                in_row = len(failed) if not len(good) else len(failed) - 1 - int(good[-1])
                self._in_row[kind] = in_row + (0 if len(good) else self._in_row[kind])
            num_late = self._late_in_row[kind] = self._late_in_row[kind] + 1 if is_late else 0
            if num_late and (num_late >= LATE_UNTIL_OPEN or self.breaker.is_open):
                self._open(f"{num_late} {kind}s in a row missed their deadline")
            elif failed.any() and (self._in_row[kind] >= self._limit or self.breaker.is_open):
                code = int(-counted[failed][-1])
                last = errno.errorcode.get(code, str(code))
                self._open(f"{self._in_row[kind]} {kind} errors in a row, the last: {last}")

    def failed(self, kind: str, error: OSError) -> None:
        """Record the failure of a single operation, for instance of an append to the journal."""
        self.note(kind, np.array([-(error.errno or errno.EIO)], np.int64))

    def succeeded(self, kind: str) -> None:
        """Record the success of an operation; resets the counts of failures in a row."""
        with self._lock:
            self._in_row[kind] = 0
            self._late_in_row[kind] = 0
            if kind != self._last_kind or not self.breaker.note(True):
                return
            self.reason = ""
        logger.info("disk tier resumed path=%s for=%s", self._what, kind)

    def trip(self, reason: str) -> None:
        """Open the breaker, regardless of the number of errors."""
        with self._lock:
            self._open(reason)

    def _open(self, reason: str) -> None:
        self.num_opened += 1
        self.reason = reason
        if self.breaker.note(False):
            logger.error("disk tier suspended path=%s reason=%s", self._what, reason)
