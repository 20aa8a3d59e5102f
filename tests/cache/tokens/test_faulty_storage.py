"""Requests survive every fault of storage: no wrong bytes, no leaks, no endless wait.

Every world checks at its end that no lease is left, and that slots and blocks add up.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.testing import FaultyStorage, MemoryStorage, StoredBlocks
from kvtier.tiers import StorageFacts

from .test_cache_storage import LONG, hits, serve_while_writes_hang
from .world import GROUP, A, B, C, World, until

MakeWorld = Callable[..., World]
NUM_BLOCKS = 30
SLOW = StorageFacts()
"""Storage whose look-ups take time, too."""


@pytest.fixture
def shelf() -> StoredBlocks:
    """Return storage that has LONG from an earlier process."""
    shelf = StoredBlocks()
    earlier = World(disk_blocks=NUM_BLOCKS, shelf=shelf)
    earlier.serve(LONG)
    earlier.end()
    assert len(shelf.blocks) == 4
    return shelf


@pytest.fixture
def make_faulty(
    make_world: MakeWorld, shelf: StoredBlocks
) -> Callable[..., tuple[World, FaultyStorage]]:
    """Return a function that makes a world over faulty storage that has LONG."""

    def make(facts: StorageFacts | None = None) -> tuple[World, FaultyStorage]:
        storage = FaultyStorage(MemoryStorage(GROUP, NUM_BLOCKS, shelf, facts=facts))
        return make_world(more_storage=(storage,), shelf=shelf), storage

    return make


@pytest.fixture
def faulty(make_faulty: Callable[..., tuple[World, FaultyStorage]]) -> tuple[World, FaultyStorage]:
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
    faulty: tuple[World, FaultyStorage], fault: str, nth: int
) -> None:
    world, storage = faulty
    READ_FAULTS[fault](storage, nth)
    request = world.start(LONG)
    assert request.lease.broken
    world.release(request)
    world.check()
    world.finish(world.start(LONG))
    assert world.matched(LONG) == [DEVICE] * 4
    world.serve(LONG)
    assert world.held(DISK) == 4, "what was lost is written again"


@pytest.mark.parametrize("fault", WRITE_FAULTS)
def test_write_that_goes_wrong_is_tried_again_with_the_next_use(
    faulty: tuple[World, FaultyStorage], shelf: StoredBlocks, fault: str
) -> None:
    world, storage = faulty
    WRITE_FAULTS[fault](storage, 1)
    world.serve([*B, 9])
    assert world.held(DISK) == 2, "of two writes one went wrong"
    assert len(shelf.blocks) == 6, "what nobody knows of does not stay"
    world.serve([*B, 9])
    assert world.held(DISK) == 4
    assert len(shelf.blocks) == 8


@pytest.mark.parametrize("facts", [None, SLOW], ids=["at once", "takes its time"])
@pytest.mark.parametrize("fault", ["fail", "refuse", "lose"])
def test_look_up_that_goes_wrong_finds_nothing(
    make_faulty: Callable[..., tuple[World, FaultyStorage]],
    facts: StorageFacts | None,
    fault: str,
) -> None:
    world, storage = make_faulty(facts)
    getattr(storage, fault)("find")
    request = world.start(LONG)
    until(world, lambda: storage.num_calls["find"] == 1)
    assert request.lease.num_shared == 0
    world.release(request)

    def is_found() -> bool:
        world.release(world.ask(LONG, load=False))
        return world.matched(LONG) == [DISK] * 4

    until(world, is_found)
    request = world.start(LONG)
    assert hits(request) == {DISK: 4}
    world.finish(request)


@pytest.mark.parametrize("facts", [None, SLOW], ids=["at once", "takes its time"])
def test_drop_that_goes_wrong_is_storages_own_affair(
    make_faulty: Callable[..., tuple[World, FaultyStorage]], facts: StorageFacts | None
) -> None:
    world, storage = make_faulty(facts)
    world.serve([*B, 9])
    assert world.held(DISK) == 4
    assert storage.num_calls["drop"] == 0, "there was nothing to drop"
    storage.fail("drop")
    world.cache.clear(DISK)
    assert world.held(DISK) == 0
    until(world, lambda: storage.num_calls["drop"] == 1)
    world.serve([*C, 9])
    assert world.held(DISK) == 4


def test_look_ups_that_got_no_answer_are_asked_again(
    make_faulty: Callable[..., tuple[World, FaultyStorage]],
) -> None:
    """This includes look-ups that were refused while the storage's breaker was open."""
    world, storage = make_faulty(SLOW)

    def ask() -> None:
        world.release(world.ask(LONG, load=False))
        until(world, lambda: not world.cache._ladder._storage_lookup._asked)

    for nth in range(1, 5):
        storage.lose("find", 1)
        ask()
        assert storage.num_calls["find"] == min(nth, 3)
    storage.forget_faults()
    world.clock.now += 1
    ask()
    assert storage.num_calls["find"] == 4
    assert world.matched(LONG) == [DISK] * 4


@pytest.mark.parametrize("facts", [None, SLOW], ids=["at once", "takes its time"])
def test_what_was_cleared_while_storage_did_not_answer_does_not_come_back(
    make_faulty: Callable[..., tuple[World, FaultyStorage]],
    shelf: StoredBlocks,
    facts: StorageFacts | None,
) -> None:
    world, storage = make_faulty(facts)

    def is_found() -> bool:
        world.release(world.ask(LONG, load=False))
        return world.held(DISK) == 4

    until(world, is_found)
    storage.fail("drop")
    world.cache._ladder.clear()
    for _ in range(3):
        assert not is_found()
    until(world, lambda: not shelf.blocks)
    assert storage.num_calls["drop"] == 2
    assert not is_found()


def test_request_whose_read_hangs_computes_in_the_end(
    faulty: tuple[World, FaultyStorage],
) -> None:
    world, storage = faulty
    storage.hang("get")
    request = world.ask(LONG)
    world.clock.now += 1000
    world.cache.poll()
    assert request.lease.ready
    assert request.lease.broken
    world.release(request)
    again = world.ask(LONG, load=False)
    assert again.lease.num_shared == 0
    storage.let_go()
    assert world.cache.drain()
    world.finish(again)
    assert world.matched(LONG) == [DEVICE] * 4


def test_writes_that_hang_hold_up_nobody(faulty: tuple[World, FaultyStorage]) -> None:
    world, storage = faulty
    storage.hang("put")
    for prompt in (B, C):
        request = serve_while_writes_hang(world, [*prompt, 9])
        assert not request.lease.broken
    assert hits(serve_while_writes_hang(world, LONG)) == {DISK: 4}
    storage.let_go()
    assert world.cache.drain()
    world.serve([*B, 9])
    world.serve([*C, 9])
    assert world.held(DISK) == 12


def test_slow_storage_is_waited_for_while_it_is_worth_it(
    faulty: tuple[World, FaultyStorage],
) -> None:
    world, storage = faulty
    storage.hold("get")
    request = world.ask(LONG)
    world.cache.poll()
    assert not request.lease.ready
    storage.let_go("get")
    assert world.cache.drain()
    assert not request.lease.broken
    world.finish(request)


def test_crash_between_write_and_commit_loses_the_block_and_nothing_else(
    faulty: tuple[World, FaultyStorage], make_world: MakeWorld, shelf: StoredBlocks
) -> None:
    world, storage = faulty
    storage.crash()
    world.serve([*B, 9])
    assert storage.is_dead
    assert world.held(DISK) == 0
    next_one = make_world(disk_blocks=NUM_BLOCKS, shelf=shelf)
    for prompt in (B, A):
        request = next_one.start([*prompt, 9])
        assert not request.lease.broken
        next_one.finish(request)
    assert next_one.held(DISK) == 8


@pytest.mark.parametrize("seed", range(12))
def test_any_faults_in_any_order_cost_time_only(
    make_faulty: Callable[..., tuple[World, FaultyStorage]], seed: int
) -> None:
    rng = random.Random(seed)
    world, storage = make_faulty(rng.choice([None, SLOW]))
    faults = [*READ_FAULTS.values(), *WRITE_FAULTS.values()]
    faults += [lambda storage, nth: storage.fail("find", nth)]
    faults += [lambda storage, nth: storage.fail("drop", nth)]
    for _ in range(25):
        rng.choice(faults)(storage, rng.randrange(1, 4))
        request = world.start([*rng.choice([A, B, C, A + B, C + A]), 9])
        if request.lease.broken:
            world.release(request)
        else:
            world.finish(request)
        world.check()
        if rng.random() < 0.5:
            world.lose_the_device()
        if rng.random() < 0.3:
            world.cache.clear(HOST)
        world.clock.now += rng.choice([0, 0, 100])
    storage.forget_faults()
    world.clock.now += 1000
    for _ in range(2):
        request = world.start(LONG)
        world.release(request) if request.lease.broken else world.finish(request)
    assert world.matched(LONG)[0] == DEVICE, "it goes on"
