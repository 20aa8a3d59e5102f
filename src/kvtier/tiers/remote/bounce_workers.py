"""Worker threads and bounce buffers for store clients whose calls cannot be cancelled.

A worker is a thread that makes the calls, with a buffer that they read and write. A caller whose
time limit has passed returns with its own memory unchanged. The call continues in the worker, which
stays in use until the call returns.
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

from kvtier.core.errors import Closed
from kvtier.core.system.process import OwnerProcess
from kvtier.core.types import BlockKey
from kvtier.tiers.codecs.codec import Uint8s
from kvtier.tiers.codecs.frame import MAX_OVERHEAD
from kvtier.tiers.disk.bounce import ALIGNMENT, Bounce
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.envelope import HEADER_BYTES, Headers
from kvtier.tiers.storage import Outcome

ROWS_BYTES: Final = 16 << 20
"""Buffer size of a worker, for at least one block. Each call has a fixed cost: with half the size,
Mooncake's client takes a quarter more CPU time for blocks of 1 MiB (measured by hand)."""
MAX_ROWS: Final = 128
"""Default number of rows in a bounce buffer."""

Result = TypeVar("Result")
IsWanted = Callable[[], bool]
Addresses = npt.NDArray[np.uint64]
Arrived = int | Outcome
"""Bytes of a value that was read, or the outcome if none was."""


class BounceRows(Bounce):
    """A page-aligned buffer for some blocks, each behind its header.

    value_bytes: most bytes of a row in use. There is always room for an encrypted block:
        otherwise it would be taken for damaged.
    addresses: uint64 [num_slots], of the blocks.
    begins: uint64 [num_slots], of their headers.
    blocks: the blocks' memory, one piece each.
    """

    def __init__(self, num_rows: int, block_bytes: int) -> None:
        self.value_bytes = HEADER_BYTES + block_bytes + MAX_OVERHEAD
        super().__init__(num_rows, -(-self.value_bytes // ALIGNMENT) * ALIGNMENT)
        self.begins = self.addresses
        self.addresses = self.begins + np.uint64(HEADER_BYTES)
        self.blocks = Pieces.whole(self.addresses, block_bytes)
        content = np.frombuffer(self.memory.owner, np.uint8)  # type: ignore[call-overload]
        self._rows = content.reshape(self.num_slots, -1)[:, : self.value_bytes]
        self._headers: Headers = self._rows[:, :HEADER_BYTES]

    @classmethod
    def for_blocks(cls, block_bytes: int, max_rows: int = MAX_ROWS) -> BounceRows:
        """Return a buffer with as many rows as ``ROWS_BYTES`` has room for."""
        value_bytes = HEADER_BYTES + block_bytes + MAX_OVERHEAD
        return cls(min(max_rows, ROWS_BYTES // value_bytes), block_bytes)

    def set_headers(self, headers: Sequence[bytes]) -> None:
        """Write the i-th header to row i."""
        rows = np.frombuffer(b"".join(headers), np.uint8).reshape(-1, HEADER_BYTES)
        self._headers[: len(rows)] = rows

    def stored(self, place: int) -> Uint8s:
        """Return the memory of a row behind its header."""
        found: Uint8s = self._rows[place, HEADER_BYTES:]
        return found

    def headers(self, num_rows: int) -> Headers:
        """Return copies of the headers of the first rows."""
        return self._headers[:num_rows].copy()


class BounceClient(ABC):
    """Calls of a store's own client, on the rows of one worker.

    Each call returns when it is done, however long that takes.

    The caller guarantees
        one thread at a time. Rows belong to the call while it runs. Keys are distinct.
    The implementer provides
        an outcome per key. Values are ``value_bytes`` of a row at most. The caller verifies them,
            also against writes that arrive after a call has returned.
    Outcomes and errors
        ``DAMAGED``: the stored value cannot be a block. An exception counts as ``FAILED`` for all
            keys; the client is closed and replaced.
    """

    @abstractmethod
    def test(self) -> str:
        """Test whether the store can be used, and describe its state.

        Raises ``Unsound`` if it cannot, ``Unreachable`` if that is not known now.
        """

    @abstractmethod
    def find(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Return ``THERE``, ``ABSENT`` or ``FAILED`` per key."""

    @abstractmethod
    def read(self, keys: Sequence[BlockKey], begins: Addresses) -> list[Arrived]:
        """Read the i-th key's value into the row that begins at the i-th of ``begins``.

        Return per key how many bytes have arrived, or the outcome if there are none.
        """

    @abstractmethod
    def write(
        self,
        keys: Sequence[BlockKey],
        begins: Addresses,
        sizes: Sequence[int],
        is_wanted: IsWanted,
    ) -> list[Outcome]:
        """Write the first bytes of the rows. Return ``THERE`` or ``FAILED`` per key.

        If ``is_wanted`` is false by the time of the write, the blocks must not be found afterwards.

        sizes: bytes of each row to write.
        """

    @abstractmethod
    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Remove keys; missing ones are ignored. Raises if that fails."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources, also after an error."""


Connect = Callable[[BounceRows], BounceClient]
Work = Callable[[BounceClient], Result]


class BounceWorker:
    """A thread, its rows, and a client that is made on demand."""

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
            del job  # do not keep it alive while waiting for the next one
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
            with suppress(Exception):  # it is discarded in any case
                client.close()

    def end(self) -> None:
        """End the thread once its current jobs are done."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)


class BounceWorkers:
    """Pool of at most ``num_workers`` bounce workers, made on demand."""

    def __init__(
        self,
        name: str,
        num_workers: int,
        block_bytes: int,
        connect: Connect,
        max_rows: int = MAX_ROWS,
    ) -> None:
        self._name = name
        self._num_workers = num_workers
        self._block_bytes = block_bytes
        self._max_rows = max_rows
        self._connect = connect
        self._process = OwnerProcess()
        self._made: list[BounceWorker] = []
        self._idle: list[BounceWorker] = []
        self._change = Condition()
        self._is_closed = False

    def take(self, ends_at: float, waits: bool = True) -> BounceWorker | None:
        """Take a worker for exclusive use. Return None if none was free in time.

        Raises ``Closed`` after a close, and in a forked child.

        waits: whether to wait for a worker until ``ends_at`` (``monotonic``).
        """
        self._process.must_be_here("a store's client")
        with self._change:
            while (left_s := ends_at - time.monotonic()) > 0:
                if self._is_closed:
                    raise Closed("this tier was closed; make a new one")
                if self._idle:
                    return self._idle.pop()
                if len(self._made) < self._num_workers:
                    name = f"kvtier {self._name} {len(self._made)}"
                    rows = BounceRows.for_blocks(self._block_bytes, self._max_rows)
                    self._made.append(BounceWorker(name, rows, self._connect))
                    return self._made[-1]
                if not waits:
                    break
                self._change.wait(left_s)
        return None

    def give_back(self, worker: BounceWorker, future: Future[Any]) -> None:
        """Return a worker to the pool when ``future``, the last one that it began, is done."""
        future.add_done_callback(lambda _: self.put_back(worker))

    def put_back(self, worker: BounceWorker) -> None:
        """Return an idle worker to the pool."""
        with self._change:
            if not self._is_closed:
                self._idle.append(worker)
                self._change.notify()
                return
        worker.end()

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
        for worker in idle:
            worker.end()
        for worker in idle:
            worker.join(max(0.0, ends_at - time.monotonic()))
