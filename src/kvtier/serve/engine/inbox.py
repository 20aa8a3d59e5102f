"""Queue of requests and calls from all threads to the engine thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from threading import Lock

from kvtier.core.errors import Closed
from kvtier.serve.engine.request import EngineBusy, Request

Call = Callable[[], None]


class Inbox:
    """Requests and calls, in order of arrival.

    All methods but ``take`` are thread-safe. most: maximum number of unfinished requests.
    """

    def __init__(self, most: int) -> None:
        self._items: queue.SimpleQueue[Request | Call | None] = queue.SimpleQueue()
        self._most = most
        self._lock = Lock()
        self._num_unfinished = 0
        self._is_closed = False

    @property
    def num_unfinished(self) -> int:
        """Admitted requests that have not ended."""
        return self._num_unfinished

    def let_in(self) -> None:
        """Admit one more request.

        Raises ``EngineBusy`` if there are too many, ``Closed`` after ``close``.
        """
        with self._lock:
            self.must_be_open()
            if self._num_unfinished >= self._most:
                raise EngineBusy(
                    f"{self._num_unfinished} requests are waiting or running; try again later"
                )
            self._num_unfinished += 1

    def note_end(self) -> None:
        """Note that an admitted request has ended."""
        with self._lock:
            self._num_unfinished -= 1

    def must_be_open(self) -> None:
        """Raise ``Closed`` after ``close``."""
        if self._is_closed:
            raise Closed("the engine is closed; make a new one")

    def close(self) -> bool:
        """Admit no more requests. Return False if it was closed already."""
        with self._lock:
            was_open, self._is_closed = not self._is_closed, True
        return was_open

    def put(self, item: Request | Call) -> None:
        """Queue an admitted request or a call for the engine thread."""
        self._items.put(item)

    def wake(self) -> None:
        """End the wait of ``take``."""
        self._items.put(None)

    def take(self, wait_s: float = 0.0) -> Iterator[Request | Call]:
        """Yield all queued items. wait_s: how long to wait if there are none."""
        while True:
            try:
                item = self._items.get(block=wait_s > 0, timeout=wait_s)
            except queue.Empty:
                return
            wait_s = 0.0
            if item is not None:
                yield item
