"""Sequence numbers of records."""

from __future__ import annotations

from threading import Lock

import numpy as np
import numpy.typing as npt


class Sequence:
    """Source of unique sequence numbers from ``first`` on. Thread-safe.

    The slabs of a set share one source, so that all parts of a block can have the same number.
    """

    def __init__(self, first: int) -> None:
        self._next = first
        self._lock = Lock()

    @property
    def next(self) -> int:
        """Next number."""
        return self._next

    def take(self, num: int) -> npt.NDArray[np.uint64]:
        """Return the next sequence numbers, ascending: uint64 [num]."""
        with self._lock:
            first, self._next = self._next, self._next + num
        return np.arange(first, first + num, dtype=np.uint64)
