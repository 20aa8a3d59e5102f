"""Sequence numbers of records."""

from __future__ import annotations

from threading import Lock

import numpy as np
import numpy.typing as npt


class Sequence:
    """Gives out numbers from ``first`` on, each once. Safe to use from several threads.

    The slabs of a set share one, so that the parts of a block can have one number, which no other
    write has.
    """

    def __init__(self, first: int) -> None:
        self._next = first
        self._lock = Lock()

    @property
    def next(self) -> int:
        """The number that comes next."""
        return self._next

    def take(self, num: int) -> npt.NDArray[np.uint64]:
        """Return the next sequence numbers, ascending: uint64 [num]."""
        with self._lock:
            first, self._next = self._next, self._next + num
        return np.arange(first, first + num, dtype=np.uint64)
