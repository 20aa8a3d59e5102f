"""Pages moved by calls, for SGLang's own metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

GIB = 1 << 30


class TransferStats:
    """Pages and GiB/s of each call in one direction, since the last ``take``."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.gib_per_s: list[float] = []


class Moves:
    """Any thread may note, and any may take."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._reads, self._writes = TransferStats(), TransferStats()

    @contextmanager
    def timing(self, is_read: bool, page_bytes: int) -> Iterator[list[bool]]:
        """Around a call, which fills the list that it is given: which pages were moved.

        A call that moved none says nothing.
        """
        are_moved: list[bool] = []
        began = time.perf_counter()
        yield are_moved
        seconds = time.perf_counter() - began
        if num := sum(are_moved):
            with self._lock:
                moved = self._reads if is_read else self._writes
                moved.pages.append(num)
                moved.gib_per_s.append(num * page_bytes / GIB / max(seconds, 1e-9))

    def take(self) -> tuple[TransferStats, TransferStats]:
        """Return what was read and written, and reset."""
        with self._lock:
            taken = self._reads, self._writes
            self._reads, self._writes = TransferStats(), TransferStats()
            return taken
