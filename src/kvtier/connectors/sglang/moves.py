"""What calls moved, for SGLang's own metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

GIB = 1 << 30


class Moved:
    """Of one direction, since the last ``take``. pages: of each call. gib_per_s: of each call."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.gib_per_s: list[float] = []


class Moves:
    """Any thread may note, and any may take."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._reads, self._writes = Moved(), Moved()

    @contextmanager
    def timing(self, is_read: bool, page_bytes: int) -> Iterator[list[bool]]:
        """Around a call, which fills the list that it is given: which pages were moved. A call that
        moved none says nothing."""
        are_moved: list[bool] = []
        began = time.perf_counter()
        yield are_moved
        seconds = time.perf_counter() - began
        if num := sum(are_moved):
            with self._lock:
                moved = self._reads if is_read else self._writes
                moved.pages.append(num)
                moved.gib_per_s.append(num * page_bytes / GIB / max(seconds, 1e-9))

    def take(self) -> tuple[Moved, Moved]:
        """What was read, and what was written."""
        with self._lock:
            taken = self._reads, self._writes
            self._reads, self._writes = Moved(), Moved()
            return taken
