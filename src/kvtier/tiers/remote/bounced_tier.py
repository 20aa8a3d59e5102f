"""Storage tier over a store whose own client moves blocks by calls that cannot be cancelled."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Event
from typing import Final

import numpy as np

from kvtier.core.errors import Closed, ConfigError, TierError
from kvtier.core.types import BlockKey, BlockName, keys_of
from kvtier.devices.base import Finding
from kvtier.tiers.codecs import make_coder
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
from kvtier.tiers.remote.envelope import (
    HEADER_BYTES,
    Envelope,
    are_coded,
    as_keys,
    size_behind,
)
from kvtier.tiers.remote.errors import Unreachable, Unsound
from kvtier.tiers.remote.location import Location, StoreOptions
from kvtier.tiers.storage import Outcome, StorageFacts, StorageSite, StorageTier

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
MAX_FOREIGN: Final = 1 << 16
"""Keys of values that can't be read here of which a note is kept."""


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
        coder = make_coder(site.coding, site.group)
        self._envelope = Envelope(self.bytes_per_block, options.secret(), coder)
        self._foreign: OrderedDict[BlockKey, None] = OrderedDict()
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
            found = self._ask(lambda client: client.find(keys), time.monotonic() + timeout_s)
        except Exception as error:
            self._note(error)
            return failed
        return [
            ABSENT
            if outcome is THERE and (key in self._foreign or self._envelope.is_others(key))
            else outcome
            for key, outcome in zip(keys, found, strict=True)
        ]

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        outcomes = [FAILED] * len(keys)
        coder, num_read = self._envelope.coder, 0
        began, decoded_s = time.monotonic(), coder.counts.decode_s

        def begin(part: list[int], rows: BounceRows) -> Work[list[Arrived]]:
            some = [keys[at] for at in part]
            return lambda client: client.read(some, rows.begins[: len(some)])

        for part, dock, found in self._moved([*range(len(keys))], begin, timeout_s):
            arrived = {}
            for place, (at, came) in enumerate(zip(part, found, strict=True)):
                if isinstance(came, Outcome):
                    outcomes[at] = came
                elif came < HEADER_BYTES:
                    outcomes[at] = DAMAGED
                else:
                    arrived[place] = came - HEADER_BYTES
                    num_read += came
            numbers = [part[place] for place in arrived]
            of_numbers = [keys[at] for at in numbers]
            delivered = self._deliver(dock.rows, arrived, of_numbers, blocks.pick(numbers))
            for at, outcome in zip(numbers, delivered, strict=True):
                outcomes[at] = outcome
        took_s = time.monotonic() - began - (coder.counts.decode_s - decoded_s)
        coder.choice.note_transfer(num_read, took_s)
        self._forget(
            [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is DAMAGED]
        )
        return outcomes

    def _deliver(
        self,
        rows: BounceRows,
        arrived: Mapping[int, int],
        keys: Sequence[BlockKey],
        blocks: Pieces,
    ) -> list[Outcome]:
        """Copy what arrived in some rows to its destination. Return the outcomes.

        arrived: bytes behind the header, by row.
        keys, blocks: of these rows.
        """
        if not arrived:
            return []
        places = [*arrived]
        headers, envelope = rows.headers(places), self._envelope
        sizes = [
            size_behind(header.tobytes(), key) for header, key in zip(headers, keys, strict=True)
        ]
        are_whole = [
            size is not None and _ends_well(came, size)
            for came, size in zip(arrived.values(), sizes, strict=True)
        ]
        are_plain = ~are_coded(headers) & are_whole
        are_plain &= not envelope.coder.is_encrypting
        are_plain &= np.array([size == self.bytes_per_block for size in sizes])
        outcomes = [DAMAGED] * len(places)
        if plain := np.flatnonzero(are_plain).tolist():
            there = blocks.pick(plain)
            stored = rows.blocks.pick([places[at] for at in plain]).cut(there.sizes)
            crcs = copied_crcs(there, stored)
            its_keys = as_keys([keys[at] for at in plain])
            are_right = envelope.are_blocks(headers[plain], its_keys, there, crcs)
            for at, is_right in zip(plain, are_right.tolist(), strict=True):
                outcomes[at] = THERE if is_right else DAMAGED
        for at in np.flatnonzero(~are_plain & are_whole).tolist():
            value = rows.stored(places[at])[: arrived[places[at]]]
            header = headers[at].tobytes()
            outcomes[at] = envelope.decode(header, keys[at], value, blocks.pick([at]))
            if outcomes[at] is ABSENT:
                self._note_foreign(keys[at])
        return outcomes

    def _note_foreign(self, key: BlockKey) -> None:
        """Record that the value of a key can't be read here, so that it is written anew."""
        self._foreign[key] = None
        if len(self._foreign) > MAX_FOREIGN:
            self._foreign.popitem(last=False)

    def _forget(self, damaged: Sequence[BlockKey]) -> None:
        """Remove damaged blocks from the store, so that intact ones can be written."""
        damaged = [key for key in damaged if not self._envelope.is_others(key)]
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
        is_others = self._envelope.is_others
        new = [
            at
            for at, outcome in enumerate(outcomes)
            if outcome is ABSENT and not is_others(keys[at])
        ]
        outcomes = [THERE if outcome is THERE else FAILED for outcome in outcomes]
        has_left = Event()

        def is_wanted() -> bool:
            return not has_left.is_set()

        def begin(part: list[int], rows: BounceRows) -> Work[list[Outcome]]:
            some = [keys[at] for at in part]
            sizes = self._fill(rows, some, blocks.pick(part))
            foreign = [key for key in some if key in self._foreign]

            def write(client: BounceClient) -> list[Outcome]:
                if foreign and is_wanted():
                    client.remove(foreign)
                return client.write(some, rows.begins[: len(some)], sizes, is_wanted)

            return write

        for part, _, stored in self._moved(new, begin, ends_at - time.monotonic()):
            for at, outcome in zip(part, stored, strict=True):
                outcomes[at] = outcome
                if outcome is THERE:
                    self._foreign.pop(keys[at], None)
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
        begin: Callable[[list[int], BounceRows], Work[list[Result]]],
        timeout_s: float,
    ) -> Iterator[tuple[list[int], BounceWorker, list[Result]]]:
        """Move ``numbers`` part by part; yield each part, its worker and its outcomes.

        Parts that failed as a whole or were not done in time are omitted.

        begin: fills the rows and returns the call to make.
        """
        ends_at = time.monotonic() + timeout_s
        under_way: deque[tuple[list[int], BounceWorker, Future[list[Result]]]] = deque()
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
        self, dock: BounceWorker, begin: Callable[[BounceRows], Work[list[Result]]]
    ) -> Future[list[Result]]:
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


def _ends_well(num_bytes: int, size: int) -> bool:
    """Return whether so many bytes behind a header can be a value of ``size``.

    Files end at a page.
    """
    rest = num_bytes - size
    return rest == 0 or (0 < rest < ALIGNMENT and (HEADER_BYTES + num_bytes) % ALIGNMENT == 0)
