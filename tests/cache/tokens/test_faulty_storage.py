"""Requests survive every fault of storage: no wrong bytes, no leaks, no endless wait.

Every harness checks at its end that no lease is left, and that slots and blocks add up.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.testing import FaultyStorage, MemoryStorage, StoredBlocks
from kvtier.tiers import StorageFacts

from .harness import GROUP, A, B, C, Harness, until
from .test_cache_storage import LONG, hits, serve_while_writes_hang

MakeHarness = Callable[..., Harness]
NUM_BLOCKS = 30
SLOW = StorageFacts()
"""Storage whose look-ups take time, too."""


@pytest.fixture
def shelf() -> StoredBlocks:
    """Return storage that has LONG from an earlier process."""
    shelf = StoredBlocks()
    earlier = Harness(disk_blocks=NUM_BLOCKS, shelf=shelf)
    earlier.serve(LONG)
    earlier.end()
    assert len(shelf.blocks) == 4
    return shelf


@pytest.fixture
def make_faulty(
    make_harness: MakeHarness, shelf: StoredBlocks
) -> Callable[..., tuple[Harness, FaultyStorage]]:
    """Return a function that makes a harness over faulty storage that has LONG."""

    def make(facts: StorageFacts | None = None) -> tuple[Harness, FaultyStorage]:
        storage = FaultyStorage(MemoryStorage(GROUP, NUM_BLOCKS, shelf, facts=facts))
        return make_harness(more_storage=(storage,), shelf=shelf), storage

    return make


@pytest.fixture
def faulty(
    make_faulty: Callable[..., tuple[Harness, FaultyStorage]],
) -> tuple[Harness, FaultyStorage]:
    return make_faulty()


Faults = dict[str, Callable[[FaultyStorage, int], None]]
READ_FAULTS: Faults = {
    "raises": lambda storage, nth: storage.fail("get", nth),
    "fails": lambda storage, nth: storage.refuse("get", nth),
    "nobody hears": lambda storage, nth: storage.lose("get", nth),
    "flipped byte": lambda storage, nth: storage.flip(nth),
    "short read": lambda storage, nth: storage.shorten(nth),
}
WRITE_FAULTS: Faults = {
    "raises": lambda storage, nth: storage.fail("put", nth),
    "fails": lambda storage, nth: storage.refuse("put", nth),
    "nobody hears": lambda storage, nth: storage.lose("put", nth),
}


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("fault", READ_FAULTS)
def test_read_that_goes_wrong_is_computed_again(
    faulty: tuple[Harness, FaultyStorage], fault: str, nth: int
) -> None:
    harness, storage = faulty
    READ_FAULTS[fault](storage, nth)
    request = harness.start(LONG)
    assert request.lease.broken
    harness.release(request)
    harness.check()
    harness.finish(harness.start(LONG))
    assert harness.matched(LONG) == [DEVICE] * 4
    harness.serve(LONG)
    assert harness.held(DISK) == 4, "what was lost is written again"


@pytest.mark.parametrize("fault", WRITE_FAULTS)
def test_write_that_goes_wrong_is_tried_again_with_the_next_use(
    faulty: tuple[Harness, FaultyStorage], shelf: StoredBlocks, fault: str
) -> None:
    harness, storage = faulty
    WRITE_FAULTS[fault](storage, 1)
    harness.serve([*B, 9])
    assert harness.held(DISK) == 2, "of two writes one went wrong"
    assert len(shelf.blocks) == 6, "what nobody knows of does not stay"
    harness.serve([*B, 9])
    assert harness.held(DISK) == 4
    assert len(shelf.blocks) == 8


@pytest.mark.parametrize("facts", [None, SLOW], ids=["at once", "takes its time"])
@pytest.mark.parametrize("fault", ["fail", "refuse", "lose"])
def test_look_up_that_goes_wrong_finds_nothing(
    make_faulty: Callable[..., tuple[Harness, FaultyStorage]],
    facts: StorageFacts | None,
    fault: str,
) -> None:
    harness, storage = make_faulty(facts)
    getattr(storage, fault)("find")
    request = harness.start(LONG)
    until(harness, lambda: storage.num_calls["find"] == 1)
    assert request.lease.num_shared == 0
    harness.release(request)

    def is_found() -> bool:
        harness.release(harness.ask(LONG, load=False))
        return harness.matched(LONG) == [DISK] * 4

    until(harness, is_found)
    request = harness.start(LONG)
    assert hits(request) == {DISK: 4}
    harness.finish(request)


@pytest.mark.parametrize("facts", [None, SLOW], ids=["at once", "takes its time"])
def test_drop_that_goes_wrong_is_storages_own_affair(
    make_faulty: Callable[..., tuple[Harness, FaultyStorage]], facts: StorageFacts | None
) -> None:
    harness, storage = make_faulty(facts)
    harness.serve([*B, 9])
    assert harness.held(DISK) == 4
    assert storage.num_calls["drop"] == 0, "there was nothing to drop"
    storage.fail("drop")
    harness.cache.clear(DISK)
    assert harness.held(DISK) == 0
    until(harness, lambda: storage.num_calls["drop"] == 1)
    harness.serve([*C, 9])
    assert harness.held(DISK) == 4


def test_look_ups_that_got_no_answer_are_asked_again(
    make_faulty: Callable[..., tuple[Harness, FaultyStorage]],
) -> None:
    """This includes look-ups that were refused while the storage's breaker was open."""
    harness, storage = make_faulty(SLOW)

    def ask() -> None:
        harness.release(harness.ask(LONG, load=False))
        until(harness, lambda: not harness.cache._ladder._storage_lookup._asked)

    for nth in range(1, 5):
        storage.lose("find", 1)
        ask()
        assert storage.num_calls["find"] == min(nth, 3)
    storage.forget_faults()
    harness.clock.now += 1
    ask()
    assert storage.num_calls["find"] == 4
    assert harness.matched(LONG) == [DISK] * 4


@pytest.mark.parametrize("facts", [None, SLOW], ids=["at once", "takes its time"])
def test_what_was_cleared_while_storage_did_not_answer_does_not_come_back(
    make_faulty: Callable[..., tuple[Harness, FaultyStorage]],
    shelf: StoredBlocks,
    facts: StorageFacts | None,
) -> None:
    harness, storage = make_faulty(facts)

    def is_found() -> bool:
        harness.release(harness.ask(LONG, load=False))
        return harness.held(DISK) == 4

    until(harness, is_found)
    storage.fail("drop")
    harness.cache._ladder.clear()
    for _ in range(3):
        assert not is_found()
    until(harness, lambda: not shelf.blocks)
    assert storage.num_calls["drop"] == 2
    assert not is_found()


def test_request_whose_read_hangs_computes_in_the_end(
    faulty: tuple[Harness, FaultyStorage],
) -> None:
    harness, storage = faulty
    storage.hang("get")
    request = harness.ask(LONG)
    harness.clock.now += 1000
    harness.cache.poll()
    assert request.lease.ready
    assert request.lease.broken
    harness.release(request)
    again = harness.ask(LONG, load=False)
    assert again.lease.num_shared == 0
    storage.release()
    assert harness.cache.drain()
    harness.finish(again)
    assert harness.matched(LONG) == [DEVICE] * 4


def test_writes_that_hang_hold_up_nobody(faulty: tuple[Harness, FaultyStorage]) -> None:
    harness, storage = faulty
    storage.hang("put")
    for prompt in (B, C):
        request = serve_while_writes_hang(harness, [*prompt, 9])
        assert not request.lease.broken
    assert hits(serve_while_writes_hang(harness, LONG)) == {DISK: 4}
    storage.release()
    assert harness.cache.drain()
    harness.serve([*B, 9])
    harness.serve([*C, 9])
    assert harness.held(DISK) == 12


def test_slow_storage_is_waited_for_while_it_is_worth_it(
    faulty: tuple[Harness, FaultyStorage],
) -> None:
    harness, storage = faulty
    storage.hold("get")
    request = harness.ask(LONG)
    harness.cache.poll()
    assert not request.lease.ready
    storage.release("get")
    assert harness.cache.drain()
    assert not request.lease.broken
    harness.finish(request)


def test_crash_between_write_and_commit_loses_the_block_and_nothing_else(
    faulty: tuple[Harness, FaultyStorage], make_harness: MakeHarness, shelf: StoredBlocks
) -> None:
    harness, storage = faulty
    storage.crash()
    harness.serve([*B, 9])
    assert storage.is_dead
    assert harness.held(DISK) == 0
    next_one = make_harness(disk_blocks=NUM_BLOCKS, shelf=shelf)
    for prompt in (B, A):
        request = next_one.start([*prompt, 9])
        assert not request.lease.broken
        next_one.finish(request)
    assert next_one.held(DISK) == 8


@pytest.mark.parametrize("seed", range(12))
def test_any_faults_in_any_order_cost_time_only(
    make_faulty: Callable[..., tuple[Harness, FaultyStorage]], seed: int
) -> None:
    rng = random.Random(seed)
    harness, storage = make_faulty(rng.choice([None, SLOW]))
    faults = [*READ_FAULTS.values(), *WRITE_FAULTS.values()]
    faults += [lambda storage, nth: storage.fail("find", nth)]
    faults += [lambda storage, nth: storage.fail("drop", nth)]
    for _ in range(25):
        rng.choice(faults)(storage, rng.randrange(1, 4))
        request = harness.start([*rng.choice([A, B, C, A + B, C + A]), 9])
        if request.lease.broken:
            harness.release(request)
        else:
            harness.finish(request)
        harness.check()
        if rng.random() < 0.5:
            harness.lose_the_device()
        if rng.random() < 0.3:
            harness.cache.clear(HOST)
        harness.clock.now += rng.choice([0, 0, 100])
    storage.forget_faults()
    harness.clock.now += 1000
    for _ in range(2):
        request = harness.start(LONG)
        harness.release(request) if request.lease.broken else harness.finish(request)
    assert harness.matched(LONG)[0] == DEVICE, "it goes on"
