"""Storage tier over a store whose own client moves blocks by calls that cannot be cancelled."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Event
from typing import Final

from kvtier.devices.base import Finding
from kvtier.errors import Closed, ConfigError, TierError
from kvtier.tiers.crc_join import copied_crcs
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.bounce_workers import (
    MAX_ROWS,
    BounceClient,
    BounceRows,
    BounceWorker,
    BounceWorkers,
    Connect,
    Result,
    Work,
)
from kvtier.tiers.remote.envelope import Envelope, as_keys
from kvtier.tiers.remote.errors import Unreachable, Unsound
from kvtier.tiers.remote.location import Location, StoreOptions
from kvtier.tiers.storage import Outcome, StorageFacts, StorageSite, StorageTier
from kvtier.types import BlockKey, BlockName, keys_of

logger = logging.getLogger(__name__)

OPEN_S: Final = 5.0
FORGET_S: Final = 1.0
DROP_S: Final = 1.0
"""Time limit of a drop. Its caller waits, possibly the scheduler."""
CLOSE_S: Final = 3.0
RETRY_S: Final = 1.0
"""Pause after a failed attempt to reach a store."""
DOCKS_PER_CALL: Final = 2
"""One worker transfers while the other one's blocks are copied and verified."""

THERE, ABSENT, DAMAGED, FAILED = Outcome
Moved = tuple[list[int], BounceWorker, list[Outcome]]


class DockedTier(StorageTier):
    """Blocks in a store that processes share: a block is the same whichever process wrote it.

    Blocks pass through the tier's own bounce buffers, because a late call continues. What was read
    is verified in the caller's memory, which a late call cannot change.

    A store that cannot be reached is tried again by a later call. Raises ``ConfigError`` for a
    store that cannot be used.

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
        self.name = site.name
        self.bytes_per_block = site.group.bytes_per_block
        self.facts = StorageFacts(
            reaches=frozenset({"host", "cpu"}),
            evicts=True,
            is_shared=True,
            request_s=options.request_s,
            num_readers=options.readers,
            num_writers=options.writers,
        )
        self._num_blocks = site.capacity_bytes // self.bytes_per_block
        self._location = location
        self._envelope = Envelope(self.bytes_per_block, options.secret())
        self._make_client = connect
        self._answer = ""  # of the first successful test
        self._reason = "not reached: no answer"  # why it is not in use
        self._last_error = ""
        self._retry_at = 0.0
        num_docks = DOCKS_PER_CALL * (options.readers + options.writers) + 1  # for look-ups
        self._docks = BounceWorkers(
            self.name, num_docks, self.bytes_per_block, self._connect, max_rows
        )
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"DockedTier({self._location})"

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def last_error(self) -> str:
        return self._reason or self._last_error

    # -- blocks ------------------------------------------------------------------------------------

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        failed = [FAILED] * len(keys)
        if not keys:
            return failed
        try:
            return self._ask(lambda client: client.find(keys), time.monotonic() + timeout_s)
        except Exception as error:
            self._note(error)
            return failed

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        outcomes = [FAILED] * len(keys)

        def begin(part: list[int], rows: BounceRows) -> Work[list[Outcome]]:
            some = [keys[at] for at in part]
            return lambda client: client.read(some, rows.begins[: len(some)])

        for part, dock, found in self._moved([*range(len(keys))], begin, timeout_s):
            for at, outcome in zip(part, found, strict=True):
                outcomes[at] = outcome
            arrived = [place for place, outcome in enumerate(found) if outcome is THERE]
            numbers = [part[place] for place in arrived]
            of_numbers = [keys[at] for at in numbers]
            are_right = self._deliver(dock.rows, arrived, of_numbers, blocks.pick(numbers))
            for at, is_right in zip(numbers, are_right, strict=True):
                outcomes[at] = THERE if is_right else DAMAGED
        self._forget([key for key, each in zip(keys, outcomes, strict=True) if each is DAMAGED])
        return outcomes

    def _deliver(
        self, rows: BounceRows, places: list[int], keys: Sequence[BlockKey], blocks: Pieces
    ) -> list[bool]:
        """Copy what arrived in some rows to its destination. Return which blocks are intact."""
        if not places:
            return []
        crcs = copied_crcs(blocks, rows.blocks.pick(places).cut(blocks.sizes))
        are_right = self._envelope.are_blocks(rows.headers(places), as_keys(keys), blocks, crcs)
        told: list[bool] = are_right.tolist()
        return told

    def _forget(self, damaged: Sequence[BlockKey]) -> None:
        """Remove damaged blocks from the store, so that intact ones can be written."""
        if not damaged:
            return
        logger.warning("wrong bytes store=%s num_blocks=%d", self._location, len(damaged))
        try:
            self._ask(lambda client: client.remove(damaged), time.monotonic() + FORGET_S)
        except Exception as error:
            self._note(error)

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        ends_at = time.monotonic() + timeout_s
        keys = keys_of(names)
        outcomes = self.find(keys, timeout_s)
        new = [at for at, outcome in enumerate(outcomes) if outcome is ABSENT]
        outcomes = [THERE if outcome is THERE else FAILED for outcome in outcomes]
        has_left = Event()

        def is_wanted() -> bool:
            return not has_left.is_set()

        def begin(part: list[int], rows: BounceRows) -> Work[list[Outcome]]:
            some, given = [keys[at] for at in part], blocks.pick(part)
            there = rows.blocks.pick(slice(0, len(some)))
            crcs = copied_crcs(there.cut(given.sizes), given)
            rows.set_headers(self._envelope.headers(some, there, crcs))
            return lambda client: client.write(some, rows.begins[: len(some)], is_wanted)

        for part, _, stored in self._moved(new, begin, ends_at - time.monotonic()):
            for at, outcome in zip(part, stored, strict=True):
                outcomes[at] = outcome
        has_left.set()  # calls in flight are late
        return outcomes

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        if not keys or not for_good:
            return  # other processes may still use it, and the store evicts by itself
        try:
            self._ask(lambda client: client.remove(keys), time.monotonic() + DROP_S)
        except Exception as error:
            raise TierError(self.name, "drop", str(error) or "no answer") from error

    # -- workers -----------------------------------------------------------------------------------

    def _ask(self, work: Work[Result], ends_at: float) -> Result:
        """Return the result of a call, or raise its exception.

        Raises ``TimeoutError`` after the deadline.
        """
        dock = self._docks.take(ends_at)
        if dock is None:
            raise TimeoutError("no answer")
        if time.monotonic() >= ends_at:
            self._docks.put_back(dock)
            raise TimeoutError("no answer")
        future = dock.begin(work)
        try:
            return future.result(max(0.0, ends_at - time.monotonic()))
        finally:
            self._docks.give_back(dock, future)

    def _moved(
        self,
        numbers: list[int],
        begin: Callable[[list[int], BounceRows], Work[list[Outcome]]],
        timeout_s: float,
    ) -> Iterator[Moved]:
        """Move ``numbers`` part by part; yield each part, its worker and its outcomes.

        Parts that failed as a whole or were not done in time are omitted.

        begin: fills the rows and returns the call to make.
        """
        ends_at = time.monotonic() + timeout_s
        under_way: deque[tuple[list[int], BounceWorker, Future[list[Outcome]]]] = deque()
        next_one = 0
        try:
            while next_one < len(numbers) or under_way:
                while next_one < len(numbers) and len(under_way) < DOCKS_PER_CALL:
                    dock = self._take(0.0 if under_way else ends_at)
                    if time.monotonic() >= ends_at:
                        self._docks.put_back(dock)
                        return
                    if dock is None:
                        break
                    part = numbers[next_one : next_one + dock.rows.num_slots]
                    next_one += len(part)
                    under_way.append((part, dock, self._begin(dock, partial(begin, part))))
                if not under_way:
                    return
                part, dock, future = under_way[0]
                try:
                    outcomes = future.result(max(0.0, ends_at - time.monotonic()))
                except Exception as error:
                    self._note(error)
                    if not future.done():
                        return
                else:
                    yield part, dock, outcomes
                under_way.popleft()
                self._docks.give_back(dock, future)
        finally:
            for _, dock, future in under_way:
                self._docks.give_back(dock, future)

    def _take(self, ends_at: float) -> BounceWorker | None:
        try:
            return self._docks.take(ends_at)
        except Closed as error:
            self._note(error)
            return None

    def _begin(
        self, dock: BounceWorker, begin: Callable[[BounceRows], Work[list[Outcome]]]
    ) -> Future[list[Outcome]]:
        try:
            work = begin(dock.rows)
        except BaseException:
            self._docks.put_back(dock)
            raise
        return dock.begin(work)

    def _connect(self, rows: BounceRows) -> BounceClient:
        """Make a client. Runs on a worker's thread. Raises if the store cannot be used."""
        if time.monotonic() < self._retry_at:
            raise Unreachable(self._reason)
        try:
            client = self._make_client(rows)
            if not self._answer:
                self._answer = self._tested(client)
        except Exception as error:
            self._reason = f"not in use: {error}"
            self._retry_at = time.monotonic() + RETRY_S
            raise
        self._reason = ""
        return client

    def _tested(self, client: BounceClient) -> str:
        try:
            return client.test()
        except BaseException:
            client.close()
            raise

    # -- upkeep ------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self._ask(lambda _: None, time.monotonic() + OPEN_S)
        except Unsound as error:
            raise ConfigError(f"storage: {self._location}: {error}") from error
        except ConfigError:
            raise
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        self._last_error = str(error) or "no answer"
        logger.debug("a call failed store=%s reason=%r", self._location, self._last_error)

    def findings(self) -> list[Finding]:
        return [Finding(f"{self.name} tier", f"{self._location} {self._reason or self._answer}")]

    def close(self) -> None:
        self._docks.close(CLOSE_S)
