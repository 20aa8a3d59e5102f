"""Worker threads and bounce buffers for store clients whose calls cannot be cancelled.

A dock is a thread that makes the calls, and memory that they read from and write into. Who asked
leaves when its time is over, with its own memory as it was; what is under way goes on in the dock,
which is in use until then.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.errors import Closed
from kvtier.system.process import OwnerProcess
from kvtier.tiers.disk.bounce import ALIGNMENT, Bounce
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.envelope import HEADER_BYTES, Headers
from kvtier.tiers.storage import Outcome
from kvtier.types import BlockKey

ROWS_BYTES: Final = 16 << 20
"""Memory of a dock, but for one block at least. A call has its price: with half of it Mooncake's
client takes a quarter more of the processor for blocks of 1 MiB (by hand)."""
MAX_ROWS: Final = 128
"""Default number of rows in a bounce buffer."""

Result = TypeVar("Result")
IsWanted = Callable[[], bool]
Addresses = npt.NDArray[np.uint64]


class BounceRows(Bounce):
    """Memory for some blocks, each behind its header, from a page on.

    addresses: uint64 [num_slots], of the blocks. begins: of their headers. blocks: the rows', one
    piece each.
    """

    def __init__(self, num_rows: int, block_bytes: int) -> None:
        self.value_bytes = HEADER_BYTES + block_bytes
        super().__init__(num_rows, -(-self.value_bytes // ALIGNMENT) * ALIGNMENT)
        self.begins = self.addresses
        self.addresses = self.begins + np.uint64(HEADER_BYTES)
        self.blocks = Pieces.whole(self.addresses, block_bytes)
        content = np.frombuffer(self.memory.owner, np.uint8)  # type: ignore[call-overload]
        self._headers = content.reshape(self.num_slots, -1)[:, :HEADER_BYTES]

    @classmethod
    def for_blocks(cls, block_bytes: int, max_rows: int = MAX_ROWS) -> BounceRows:
        """As many as ``ROWS_BYTES`` have room for."""
        return cls(min(max_rows, ROWS_BYTES // (HEADER_BYTES + block_bytes)), block_bytes)

    def set_headers(self, headers: Sequence[bytes]) -> None:
        """The i-th to row i."""
        rows = np.frombuffer(b"".join(headers), np.uint8).reshape(-1, HEADER_BYTES)
        self._headers[: len(rows)] = rows

    def headers(self, places: Sequence[int]) -> Headers:
        """Copies of those in some rows."""
        return np.take(self._headers, places, axis=0)


class BounceClient(ABC):
    """The calls of a store's own client, made for the rows of one dock.

    Each returns when it is done, however long that takes.

    The caller guarantees
        one thread at a time. Rows belong to the call while it runs. No key twice.
    The implementer provides
        an outcome per key. Values are a row's first ``value_bytes``; whether they are the right
        ones is checked elsewhere, also against what comes later than a call has said.
    Outcomes and errors
        ``DAMAGED``: what is there can't be a value. Whatever is raised counts as ``FAILED`` for all
        keys; the client is closed then, and another one made.
    """

    @abstractmethod
    def test(self) -> str:
        """Whether the store is fit for use: how it is, in words.

        Raises ``Unsound`` where it is not, ``Unreachable`` where that can't be known now.
        """

    @abstractmethod
    def find(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """``THERE``, ``ABSENT`` or ``FAILED``."""

    @abstractmethod
    def read(self, keys: Sequence[BlockKey], begins: Addresses) -> list[Outcome]:
        """The i-th key's value to the row that begins at the i-th of ``begins``."""

    @abstractmethod
    def write(
        self, keys: Sequence[BlockKey], begins: Addresses, is_wanted: IsWanted
    ) -> list[Outcome]:
        """``THERE`` or ``FAILED``.

        What is not wanted any more when it is written is not to be found, or is removed.
        """

    @abstractmethod
    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Keys that are not there are passed over. Raises where it can't be done."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back, also after an error."""


Connect = Callable[[BounceRows], BounceClient]
Work = Callable[[BounceClient], Result]


class BounceWorker:
    """A thread, rows, and a client that is made when it is needed."""

    def __init__(self, name: str, rows: BounceRows, connect: Connect) -> None:
        self.rows = rows
        self._connect = connect
        self._client: BounceClient | None = None
        self._jobs: SimpleQueue[tuple[Future[Any], Work[Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Work[Result]) -> Future[Result]:
        future: Future[Result] = Future()
        self._jobs.put((future, work))
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(*job)
            del job  # or it would stay while the next one is waited for
        self._disconnect()

    def _do(self, future: Future[Any], work: Work[Any]) -> None:
        try:
            if self._client is None:
                self._client = self._connect(self.rows)
            result = work(self._client)
        except BaseException as error:
            self._disconnect()
            future.set_exception(error)
        else:
            future.set_result(result)

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):  # it is of no use in any case
                client.close()

    def end(self) -> None:
        """When what is under way is done."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)


class BounceWorkers:
    """Bounce workers, made on demand, ``num_docks`` at most."""

    def __init__(
        self,
        name: str,
        num_docks: int,
        block_bytes: int,
        connect: Connect,
        max_rows: int = MAX_ROWS,
    ) -> None:
        self._name = name
        self._num_docks = num_docks
        self._block_bytes = block_bytes
        self._max_rows = max_rows
        self._connect = connect
        self._process = OwnerProcess()
        self._made: list[BounceWorker] = []
        self._idle: list[BounceWorker] = []
        self._change = Condition()
        self._is_closed = False

    def take(self, ends_at: float) -> BounceWorker | None:
        """One that nobody else uses until it is given back; None where there was none in time.

        Raises ``Closed`` after a close, and in a forked child.
        """
        self._process.must_be_here("a store's client")
        with self._change:
            while True:
                if self._is_closed:
                    raise Closed("this tier was closed; make a new one")
                if self._idle:
                    return self._idle.pop()
                if len(self._made) < self._num_docks:
                    name = f"kvtier {self._name} {len(self._made)}"
                    dock = BounceWorker(
                        name,
                        BounceRows.for_blocks(self._block_bytes, self._max_rows),
                        self._connect,
                    )
                    self._made.append(dock)
                    return dock
                left_s = ends_at - time.monotonic()
                if left_s <= 0:
                    return None
                self._change.wait(left_s)

    def give_back(self, dock: BounceWorker, future: Future[Any]) -> None:
        """When ``future``, the last one that it began, is done: now, or later."""
        future.add_done_callback(lambda _: self.put_back(dock))

    def put_back(self, dock: BounceWorker | None) -> None:
        """One that nothing is under way in."""
        if dock is None:
            return
        with self._change:
            if not self._is_closed:
                self._idle.append(dock)
                self._change.notify()
                return
        dock.end()

    def close(self, timeout_s: float) -> None:
        """Close idle workers; busy ones end when their call returns, if ever."""
        if not self._process.is_here:
            return  # threads and connections are the parent's
        with self._change:
            if self._is_closed:
                return
            self._is_closed = True
            idle, self._idle = self._idle, []
            self._change.notify_all()
        ends_at = time.monotonic() + timeout_s
        for dock in idle:
            dock.end()
        for dock in idle:
            dock.join(max(0.0, ends_at - time.monotonic()))
