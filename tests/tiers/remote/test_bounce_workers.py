"""Bounce workers, and the tier over them, with a client that is slow, late or wrong."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from threading import Condition
from typing import Any

import pytest

from kvtier.core.config import DEFAULT_CODING, CodingConfig
from kvtier.core.errors import ConfigError
from kvtier.core.types import BlockKey
from kvtier.layout import KVGroup
from kvtier.testing.storage_suite import GROUP
from kvtier.testing.storage_user import User
from kvtier.tiers import Outcome, StorageSite, StorageTier
from kvtier.tiers.remote.bounce_workers import (
    Addresses,
    Arrived,
    BounceClient,
    BounceRows,
    BounceWorker,
    BounceWorkers,
    IsWanted,
)
from kvtier.tiers.remote.bounced_tier import BouncedTier
from kvtier.tiers.remote.errors import Unreachable, Unsound
from kvtier.tiers.remote.location import StoreOptions, read_location, read_options
from tests.kit.waiting import wait_until
from tests.tiers.remote.store_tests import (
    CodedStoreTests,
    Place,
    StoreSuite,
    StoreTests,
    closed_later,
)

THERE, ABSENT, DAMAGED, FAILED = Outcome


class Shelf:
    """Values by key, and the faults on the way to them.

    left: number of blocks that are transferred before calls hang; None for no limit.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.trouble: Exception | None = None
        self.num_clients = 0
        self._left: int | None = None
        self._change = Condition()

    def pass_on(self) -> None:
        with self._change:
            self._change.wait_for(lambda: self._left != 0)
            if self._left is not None:
                self._left -= 1
        if self.trouble is not None:
            raise self.trouble

    @contextmanager
    def stalled(self, passes: int = 0) -> Iterator[None]:
        self._let(passes)
        try:
            yield
        finally:
            self._let(None)

    def _let(self, left: int | None) -> None:
        with self._change:
            self._left = left
            self._change.notify_all()


class ShelfClient(BounceClient):
    def __init__(self, shelf: Shelf, rows: BounceRows) -> None:
        shelf.pass_on()
        self.shelf, self._rows = shelf, rows
        shelf.num_clients += 1

    def test(self) -> str:
        return "answers"

    def find(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        self.shelf.pass_on()
        return [THERE if key in self.shelf.values else ABSENT for key in keys]

    def read(self, keys: Sequence[BlockKey], begins: Addresses) -> list[Arrived]:
        return [self._read(key, begin) for key, begin in zip(keys, begins.tolist(), strict=True)]

    def _read(self, key: BlockKey, begin: int) -> Arrived:
        self.shelf.pass_on()
        value = self.shelf.values.get(key)
        if value is None:
            return ABSENT
        if len(value) > self._rows.value_bytes:
            return DAMAGED
        ctypes.memmove(begin, value, len(value))
        return len(value)

    def write(
        self, keys: Sequence[BlockKey], begins: Addresses, sizes: Sequence[int], is_wanted: IsWanted
    ) -> list[Outcome]:
        for key, begin, size in zip(keys, begins.tolist(), sizes, strict=True):
            self.shelf.pass_on()
            if not is_wanted():
                return [FAILED] * len(keys)
            self.shelf.values[key] = ctypes.string_at(begin, size)
        return [THERE] * len(keys)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self.shelf.pass_on()
        for key in keys:
            self.shelf.values.pop(key, None)

    def close(self) -> None:
        self.shelf.num_clients -= 1


Connect = Callable[[BounceRows], BounceClient]


def over(
    connect: Connect,
    num_blocks: int = 64,
    query: str = "",
    group: KVGroup = GROUP,
    coding: CodingConfig = DEFAULT_CODING,
) -> BouncedTier:
    location = read_location("shelf", f"//here?{query}")
    site = StorageSite("shelf", "", group, num_blocks * group.bytes_per_block, coding=coding)
    options = read_options(StoreOptions, location)
    return closed_later(BouncedTier(site, location, options, connect))


def tier_of(shelf: Shelf, num_blocks: int = 64, query: str = "") -> BouncedTier:
    return over(lambda rows: ShelfClient(shelf, rows), num_blocks, query)


class ShelfPlace(Place):
    @pytest.fixture(autouse=True)
    def _shelves(self) -> None:
        self.shelves: dict[str, Shelf] = {}

    def open_tier(
        self, place: str, num_blocks: int = 64, *shape: Any, **options: Any
    ) -> StorageTier:
        shelf = self.shelves.setdefault(place, Shelf())
        return over(lambda rows: ShelfClient(shelf, rows), num_blocks, "", *shape)

    def value(self, place: str, key: BlockKey) -> bytes:
        return self.shelves[place].values[key]

    def replace(self, place: str, key: BlockKey, content: bytes) -> None:
        self.shelves[place].values[key] = content


class TestBouncedTier(ShelfPlace, StoreSuite):
    @contextmanager
    def stall(self, storage: StorageTier, num_blocks: int) -> Iterator[None]:
        with self.shelves[self.prefix].stalled(num_blocks):
            yield


class TestBounced(ShelfPlace, StoreTests):
    num_flips = 300


class TestCoded(ShelfPlace, CodedStoreTests):
    num_changes = 120


# -- late writes -----------------------------------------------------------------------------------


class LateClient(ShelfClient):
    """Reports a read as done and goes on writing into its rows, as a network card may."""

    def read(self, keys: Sequence[BlockKey], begins: Addresses) -> list[Arrived]:
        outcomes = super().read(keys, begins)
        stop_at = time.monotonic() + 0.003

        def scribble() -> None:
            while time.monotonic() < stop_at:
                for begin in begins.tolist():
                    ctypes.memset(begin + 96, os.urandom(1)[0], GROUP.bytes_per_block)

        threading.Thread(target=scribble, daemon=True).start()
        return outcomes


def test_what_comes_late_into_a_dock_is_never_taken_for_a_block() -> None:
    shelf = Shelf()
    honest, tier = tier_of(shelf), over(lambda rows: LateClient(shelf, rows))
    seen = set()
    for _ in range(100):
        assert User(honest).put(*range(30)) == [THERE] * 30
        seen.update(User(tier).get(*range(30)))  # which compares every byte of the found blocks
    assert DAMAGED in seen, "nothing came late: the test is too slow"


def test_calls_that_never_end_take_a_bounded_number_of_docks() -> None:
    shelf = Shelf()
    tier = tier_of(shelf, query="readers=2&writers=1")
    assert User(tier).put(*range(4)) == [THERE] * 4
    hurried = User(tier, timeout_s=0.02)
    before = threading.active_count()
    with shelf.stalled():
        for _ in range(20):
            assert hurried.get(0, 1) == [FAILED] * 2
        assert threading.active_count() <= before + 2 * 3 + 1
        assert shelf.num_clients <= 2 * 3 + 1
    wait_until(lambda: hurried.get(0, 1) == [THERE] * 2)
    tier.close()
    wait_until(lambda: shelf.num_clients == 0, "all clients are closed")


def test_tier_that_is_closed_while_a_call_hangs_is_closed_later() -> None:
    shelf = Shelf()
    tier = tier_of(shelf)
    User(tier).put(1)
    with shelf.stalled():
        assert User(tier, timeout_s=0.02).get(1) == [FAILED]
        tier.close()
        assert shelf.num_clients, "one is under way"
    wait_until(lambda: shelf.num_clients == 0)


# -- a store that fails ----------------------------------------------------------------------------


def test_store_that_is_not_there_can_come_later() -> None:
    shelf = Shelf()
    shelf.trouble = Unreachable("nobody listens")
    tier = tier_of(shelf)
    assert "nobody listens" in tier.findings()[0].found
    assert User(tier).get(1) == User(tier).put(1) == [FAILED]
    shelf.trouble = None
    wait_until(lambda: User(tier).put(1) == [THERE])
    assert User(tier).get(1) == [THERE]
    assert "answers" in tier.findings()[0].found


def test_client_that_raises_is_closed_and_another_one_made() -> None:
    shelf = Shelf()
    tier = tier_of(shelf)
    user = User(tier)
    assert user.put(1) == [THERE]
    shelf.trouble = RuntimeError("from the depths of a library")
    assert user.get(1) == user.find(1) == user.put(2) == [FAILED]
    assert shelf.num_clients == 0
    shelf.trouble = None
    wait_until(lambda: user.get(1) == [THERE])
    tier.close()


def test_store_that_is_not_fit_for_use_is_refused() -> None:
    class Broken(ShelfClient):
        def test(self) -> str:
            raise Unsound("it gives back something else")

    shelf = Shelf()
    with pytest.raises(ConfigError, match="it gives back something else"):
        over(lambda rows: Broken(shelf, rows))
    assert shelf.num_clients == 0


def test_store_that_shows_itself_unfit_later_is_never_used() -> None:
    class Broken(ShelfClient):
        def test(self) -> str:
            raise Unsound("it gives back something else")

    shelf = Shelf()
    shelf.trouble = Unreachable("nobody listens")
    tier = over(lambda rows: Broken(shelf, rows))
    shelf.trouble = None
    wait_until(lambda: User(tier).put(1) == [FAILED] and "else" in str(tier.findings()))
    assert not shelf.values


# -- rows ------------------------------------------------------------------------------------------


def test_large_block_has_a_dock_of_one_row() -> None:
    rows = BounceRows.for_blocks(9 << 20)
    assert rows.num_slots == 1
    assert rows.slot_bytes >= 96 + (9 << 20)
    assert rows.memory.address % 4096 == 0


def test_docks_are_made_when_they_are_needed() -> None:
    shelf = Shelf()
    docks = BounceWorkers("few", 2, GROUP.bytes_per_block, lambda rows: ShelfClient(shelf, rows))
    first, second = (docks.take(inf) for _ in range(2))
    assert isinstance(first, BounceWorker)
    assert isinstance(second, BounceWorker)
    assert docks.take(inf, waits=False) is None, "there are two"
    docks.put_back(first)
    assert docks.take(inf) is first
    for each in (first, second):
        docks.put_back(each)
    docks.close(1.0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_child_that_was_forked_uses_nothing_of_its_parent() -> None:
    shelf = Shelf()
    tier = tier_of(shelf)
    assert User(tier).put(1) == [THERE]
    child = os.fork()
    if not child:
        is_right = User(tier, timeout_s=1.0).get(1) == [FAILED]
        tier.close()
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert User(tier).get(1) == [THERE]
    tier.close()
