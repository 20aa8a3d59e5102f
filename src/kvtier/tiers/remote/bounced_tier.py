"""Storage tier over a store whose own client moves blocks by calls that cannot be cancelled."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from threading import Event
from typing import Final

import numpy as np

from kvtier.core.errors import Closed, ConfigError
from kvtier.core.types import BlockKey
from kvtier.devices.base import Finding
from kvtier.tiers.crc_join import copied_crcs
from kvtier.tiers.disk.bounce import ALIGNMENT
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.bounce_workers import (
    MAX_ROWS,
    Arrived,
    BounceClient,
    BounceRows,
    BounceWorker,
    BounceWorkers,
    Connect,
    Result,
    Work,
)
from kvtier.tiers.remote.envelope import CODED_MAGIC, HEADER_BYTES, as_keys, size_behind
from kvtier.tiers.remote.errors import Unreachable, Unsound
from kvtier.tiers.remote.location import Location, StoreOptions
from kvtier.tiers.remote.store_tier import ABSENT, DAMAGED, FAILED, THERE, StoreTier
from kvtier.tiers.storage import Outcome, StorageSite

logger = logging.getLogger(__name__)

OPEN_S: Final = 5.0
CLOSE_S: Final = 3.0
RETRY_S: Final = 1.0
"""Pause after a failed attempt to reach a store."""
WORKERS_PER_CALL: Final = 2
"""One worker transfers while the other one's blocks are copied and verified."""
MAX_FOREIGN: Final = 1 << 16
"""Keys of values that can't be read here of which a note is kept."""


class BouncedTier(StoreTier):
    """Tier whose blocks pass through its own bounce buffers, because a late call continues.

    What was read is verified in the caller's memory, which a late call cannot change.

    Raises ``ConfigError`` for a store that cannot be used.

    max_rows: maximum blocks per client call.
    connect: makes a client.
    """

    def __init__(
        self,
        site: StorageSite,
        location: Location,
        options: StoreOptions,
        connect: Connect,
        max_rows: int = MAX_ROWS,
    ) -> None:
        super().__init__(site, location, options)
        self._foreign: OrderedDict[BlockKey, None] = OrderedDict()
        self._make_client = connect
        self._answer = ""  # of the first successful test
        self._reason = "not reached: no answer"  # why it is not in use
        self._last_error = ""
        self._retry_at = 0.0
        num_workers = WORKERS_PER_CALL * (options.readers + options.writers) + 1  # for look-ups
        self._workers = BounceWorkers(
            self.name, num_workers, self.bytes_per_block, self._connect, max_rows
        )
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def last_error(self) -> str:
        return self._reason or self._last_error

    # -- blocks ------------------------------------------------------------------------------------

    def _find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        try:
            found = self._call(lambda client: client.find(keys), timeout_s)
        except Exception:
            return [FAILED] * len(keys)
        return [
            ABSENT if key in self._foreign else outcome
            for key, outcome in zip(keys, found, strict=True)
        ]

    def _read(
        self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float
    ) -> tuple[list[Outcome], int]:
        outcomes, num_read = [FAILED] * len(keys), 0

        def begin(part: slice, rows: BounceRows) -> Work[list[Arrived]]:
            some = keys[part]
            return lambda client: client.read(some, rows.begins[: len(some)])

        for part, rows, found in self._moved(len(keys), begin, timeout_s):
            num_read += sum(came for came in found if not isinstance(came, Outcome))
            outcomes[part] = self._deliver(rows, found, keys[part], blocks.pick(part))
        return outcomes, num_read

    def _deliver(
        self, rows: BounceRows, found: list[Arrived], keys: Sequence[BlockKey], blocks: Pieces
    ) -> list[Outcome]:
        """Copy what arrived in the first rows to its destination. Return the outcomes."""
        envelope, headers = self._envelope, rows.headers(len(found))
        outcomes = [came if isinstance(came, Outcome) else DAMAGED for came in found]
        plain = []
        for at, (key, came) in enumerate(zip(keys, found, strict=True)):
            header = headers[at].tobytes()
            size = None if isinstance(came, Outcome) else size_behind(header, key)
            if size is None or isinstance(came, Outcome) or not _ends_well(came, size):
                continue
            is_plain = not header.startswith(CODED_MAGIC) and not envelope.coder.is_encrypting
            if is_plain and size == self.bytes_per_block:
                plain.append(at)
                continue
            outcomes[at] = envelope.decode(header, key, rows.stored(at)[:size], blocks.pick([at]))
            if outcomes[at] is ABSENT:
                self._note_foreign(key)
        if plain:
            there = blocks.pick(plain)
            crcs = copied_crcs(there, rows.blocks.pick(plain).cut(there.sizes))
            its_keys = as_keys([keys[at] for at in plain])
            are_right = envelope.are_blocks(headers[plain], its_keys, there, crcs)
            for at in np.compress(are_right, plain).tolist():
                outcomes[at] = THERE
        return outcomes

    def _note_foreign(self, key: BlockKey) -> None:
        """Record that the value of a key can't be read here, so that it is written anew."""
        self._foreign[key] = None
        if len(self._foreign) > MAX_FOREIGN:
            self._foreign.popitem(last=False)

    def _write(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        outcomes, has_left = [FAILED] * len(keys), Event()

        def is_wanted() -> bool:
            return not has_left.is_set()

        def begin(part: slice, rows: BounceRows) -> Work[list[Outcome]]:
            some = keys[part]
            sizes = self._fill(rows, some, blocks.pick(part))
            foreign = [key for key in some if key in self._foreign]

            def write(client: BounceClient) -> list[Outcome]:
                if foreign and is_wanted():
                    client.remove(foreign)
                return client.write(some, rows.begins[: len(some)], sizes, is_wanted)

            return write

        for part, _, stored in self._moved(len(keys), begin, timeout_s):
            outcomes[part] = stored
            for key, outcome in zip(keys[part], stored, strict=True):
                if outcome is THERE:
                    self._foreign.pop(key, None)
        has_left.set()  # calls in flight are late
        return outcomes

    def _fill(self, rows: BounceRows, keys: Sequence[BlockKey], blocks: Pieces) -> list[int]:
        """Fill the first rows with the values of blocks. Return their sizes."""
        if self._envelope.coder.changes_blocks:
            made = [
                self._envelope.encode(key, blocks.pick([at]), rows.stored(at))
                for at, key in enumerate(keys)
            ]
            rows.set_headers([header for header, _, _ in made])
            return [HEADER_BYTES + num_bytes for _, num_bytes, _ in made]
        there = rows.blocks.pick(slice(0, len(keys)))
        crcs = copied_crcs(there.cut(blocks.sizes), blocks)
        rows.set_headers(self._envelope.headers(keys, there, crcs))
        return [HEADER_BYTES + self.bytes_per_block] * len(keys)

    def _remove(self, keys: Sequence[BlockKey], timeout_s: float) -> None:
        self._call(lambda client: client.remove(keys), timeout_s)

    # -- workers -----------------------------------------------------------------------------------

    def _call(self, work: Work[Result], timeout_s: float) -> Result:
        """Return the result of a call, or raise its exception.

        Raises ``TimeoutError`` after the deadline.
        """
        ends_at = time.monotonic() + timeout_s
        try:
            worker = self._workers.take(ends_at)
            if worker is None:
                raise TimeoutError("no answer")
            future = worker.begin(work)
            try:
                return future.result(max(0.0, ends_at - time.monotonic()))
            finally:
                self._workers.give_back(worker, future)
        except Exception as error:
            self._note(error)
            raise

    def _moved(
        self,
        num: int,
        begin: Callable[[slice, BounceRows], Work[list[Result]]],
        timeout_s: float,
    ) -> Iterator[tuple[slice, BounceRows, list[Result]]]:
        """Move ``num`` blocks part by part; yield each part, its rows and its outcomes.

        Parts that failed as a whole or were not done in time are omitted.

        begin: fills the rows and returns the call to make.
        """
        ends_at, start = time.monotonic() + timeout_s, 0
        in_flight: deque[tuple[slice, BounceWorker, Future[list[Result]]]] = deque()
        try:
            while True:
                while start < num and len(in_flight) < WORKERS_PER_CALL:
                    worker = self._workers.take(ends_at, waits=not in_flight)
                    if worker is None:
                        break
                    part = slice(start, min(start + worker.rows.num_slots, num))
                    try:
                        work = begin(part, worker.rows)
                    except BaseException:
                        self._workers.put_back(worker)
                        raise
                    in_flight.append((part, worker, worker.begin(work)))
                    start = part.stop
                if not in_flight:
                    return
                part, worker, future = in_flight[0]
                try:
                    outcomes = future.result(max(0.0, ends_at - time.monotonic()))
                except Exception as error:
                    self._note(error)
                    if not future.done():
                        return
                else:
                    yield part, worker.rows, outcomes
                in_flight.popleft()
                self._workers.give_back(worker, future)
        except Closed as error:
            self._note(error)
        finally:
            for _, worker, future in in_flight:
                self._workers.give_back(worker, future)

    def _connect(self, rows: BounceRows) -> BounceClient:
        """Make a client. Runs on a worker's thread. Raises if the store cannot be used."""
        if time.monotonic() < self._retry_at:
            raise Unreachable(self._reason)
        client: BounceClient | None = None
        try:
            client = self._make_client(rows)
            self._answer = self._answer or client.test()
        except Exception as error:
            self._reason = f"not in use: {error}"
            self._retry_at = time.monotonic() + RETRY_S
            if client is not None:
                client.close()
            raise
        self._reason = ""
        return client

    # -- upkeep ------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self._call(lambda _: None, OPEN_S)
        except Unsound as error:
            raise ConfigError(f"storage: {self._location}: {error}") from error
        except ConfigError:
            raise
        except Exception as error:
            logger.debug("not reached store=%s reason=%r", self._location, str(error))

    def _note(self, error: Exception) -> None:
        self._last_error = str(error) or "no answer"
        logger.debug("a call failed store=%s reason=%r", self._location, self._last_error)

    def findings(self) -> list[Finding]:
        return [Finding(f"{self.name} tier", f"{self._location} {self._reason or self._answer}")]

    def close(self) -> None:
        self._workers.close(CLOSE_S)


def _ends_well(num_bytes: int, size: int) -> bool:
    """Return whether so many bytes can be a header and a value of ``size``.

    Files end at a page.
    """
    rest = num_bytes - HEADER_BYTES - size
    return rest == 0 or (0 < rest < ALIGNMENT and num_bytes % ALIGNMENT == 0)
