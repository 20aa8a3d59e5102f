"""Reading storage for requests that are still queued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtier.core.errors import ConfigError
from kvtier.core.types import DEVICE, DISK, HOST, PrefetchPolicy
from kvtier.testing import StoredBlocks

from .world import A, B, World

MakeWorld = Callable[..., World]
LONG_A, LONG_B = [*A, 9], [*B, 9]
"""Four blocks each, read in two pieces, and a token left to compute."""


@pytest.fixture
def shelf(make_world: MakeWorld) -> StoredBlocks:
    """Return storage that has A and B from an earlier world."""
    shelf = StoredBlocks()
    earlier = make_world(disk_blocks=30, shelf=shelf)
    for prompt in (LONG_A, LONG_B):
        earlier.serve(prompt)
    return shelf.copy()


@pytest.fixture
def world(make_world: MakeWorld, shelf: StoredBlocks) -> World:
    return make_world(disk_blocks=30, shelf=shelf)


def hits(world: World, tokens: list[int]) -> dict[str, int]:
    request = world.start(tokens)
    found = request.lease.record.hit_blocks
    world.finish(request)
    return found


def test_what_arrives_before_the_turn_comes_from_host_memory(world: World) -> None:
    prefetch = world.prefetch(LONG_A)
    assert not prefetch.ready
    assert world.cache.drain()
    assert prefetch.ready
    assert world.matched(LONG_A) == [HOST] * 4
    world.check()
    assert hits(world, LONG_A) == {HOST: 4}


def test_what_was_prefetched_stays_until_it_is_used(world: World) -> None:
    prefetch = world.prefetch(LONG_A)
    assert world.cache.drain()
    world.cache.clear(HOST)
    assert world.matched(LONG_A) == [HOST] * 4
    world.end_prefetch(prefetch)
    world.cache.clear(HOST)
    assert world.matched(LONG_A) == [DISK] * 4


def test_what_is_in_host_memory_already_is_held_too(world: World) -> None:
    first = world.prefetch(LONG_A)
    assert world.cache.drain()
    second = world.prefetch(LONG_A)
    assert second.ready
    world.end_prefetch(first)
    world.cache.clear(HOST)
    assert world.matched(LONG_A) == [HOST] * 4


def test_nothing_is_read_twice(world: World) -> None:
    world.storage.open_reads.clear()
    world.prefetch(LONG_A)
    world.prefetch([*A, 5])
    request = world.ask(LONG_A)
    world.storage.open_reads.set()
    assert world.cache.drain()
    assert [len(keys) for keys in world.storage.reads] == [2, 2]
    assert request.lease.num_shared == 4
    assert not request.lease.broken


def test_what_was_not_begun_is_not_read_after_the_end(world: World) -> None:
    world.storage.open_reads.clear()
    prefetch = world.prefetch(LONG_A)
    assert world.storage.is_reading.wait(60)
    world.end_prefetch(prefetch)
    world.check()
    assert len(world.cache._ladder._transfers.transfers) == 1
    world.storage.open_reads.set()
    assert world.cache.drain()
    assert len(world.storage.reads) == 1
    assert world.matched(LONG_A) == [HOST, HOST, DISK, DISK]


def test_what_somebody_else_wants_is_read_to_the_end(world: World) -> None:
    world.storage.open_reads.clear()
    first, second = world.prefetch(LONG_A), world.prefetch([*A, 5])
    world.end_prefetch(first)
    world.storage.open_reads.set()
    assert world.cache.drain()
    assert second.ready
    assert world.matched(LONG_A) == [HOST] * 4


def test_a_load_does_not_wait_for_others_prefetch(world: World) -> None:
    """It waits for the piece that is being read, and overtakes the next one."""
    world.storage.open_reads.clear()
    world.prefetch(LONG_A)
    assert world.storage.is_reading.wait(60)
    request = world.ask(LONG_B)
    world.storage.open_reads.set()
    assert world.cache.drain()
    world.check_request(request)
    order = [keys[0] in world.storage.reads[0] for keys in world.storage.reads]
    ours = {world.cache._index.key(block) for block in request.lease.blocks}
    read = [bool(ours.intersection(keys)) for keys in world.storage.reads]
    assert read == [False, True, True, False]
    assert order == [True, False, False, False]


def test_waiting_requests_hold_half_of_the_host_tier_at_most(
    make_world: MakeWorld, shelf: StoredBlocks
) -> None:
    world = make_world(disk_blocks=30, shelf=shelf, host_blocks=10)
    first = world.prefetch(LONG_A)
    assert len(first.blocks) == 4
    assert world.prefetch(LONG_B) is None, "ask again later"
    assert world.cache.drain()
    world.end_prefetch(first)
    assert world.prefetch(LONG_B) is not None
    assert world.cache.drain()
    world.check()


def test_a_prompt_longer_than_that_is_prefetched_in_part(
    make_world: MakeWorld, shelf: StoredBlocks
) -> None:
    world = make_world(disk_blocks=30, shelf=shelf, host_blocks=6)
    world.prefetch(LONG_A)
    assert world.cache.drain()
    assert world.matched(LONG_A) == [HOST, HOST, HOST, DISK]


def test_a_block_that_can_not_be_read_leaves_the_others(world: World) -> None:
    world.storage.open_reads.clear()
    prefetch = world.prefetch(LONG_A)
    *_, last = world.cache.match(b"namespace", world.ask(LONG_A, load=False).labels).blocks
    world.storage.spoiled.add(world.cache._index.key(last))
    world.storage.open_reads.set()
    assert world.cache.drain()
    assert prefetch.ready
    assert prefetch.broken
    assert world.matched(LONG_A) == [HOST] * 3


def test_without_storage_there_is_nothing_to_wait_for(make_world: MakeWorld) -> None:
    world = make_world()
    world.serve(LONG_A)
    prefetch = world.prefetch(LONG_A)
    assert prefetch.ready
    assert not world.cache.is_worth_waiting(prefetch)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (PrefetchPolicy.BEST_EFFORT, [False, False, False, False]),
        (PrefetchPolicy.TIMEOUT, [True, False, False, False]),
        (PrefetchPolicy.WAIT_COMPLETE, [True, True, False, False]),
    ],
)
def test_policies_say_how_long_a_request_waits(
    make_world: MakeWorld, shelf: StoredBlocks, policy: PrefetchPolicy, expected: list[bool]
) -> None:
    """Wait times: none, until the time-out, until the loads' deadline, or until all has arrived."""
    world = make_world(disk_blocks=30, shelf=shelf, prefetch_policy=policy)
    world.storage.open_reads.clear()
    prefetch = world.prefetch(LONG_A)
    waits = []
    for seconds in (0.0, 2.0, 1000.0):
        world.clock.now += seconds
        waits.append(world.cache.is_worth_waiting(prefetch))
    world.clock.now -= 1002.0
    world.storage.open_reads.set()
    assert world.cache.drain()
    waits.append(world.cache.is_worth_waiting(prefetch))
    assert waits == expected


def test_a_withdrawn_read_is_no_failure(world: World) -> None:
    world.storage.open_reads.clear()
    prefetch = world.prefetch(LONG_A)
    assert world.storage.is_reading.wait(60)
    world.end_prefetch(prefetch)
    world.storage.open_reads.set()
    assert world.cache.drain()
    failed = world.cache.metrics.registry.get_sample_value(
        "kvtier_failed_copies_total", {"src": DISK, "dst": HOST}
    )
    assert failed is None


def test_unknown_policy_and_bad_timeout_are_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="prefetch_policy"):
        replace(world.cache.config, prefetch_policy="eager")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="prefetch_timeout_s"):
        replace(world.cache.config, prefetch_timeout_s=0)


# -- without host memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", PrefetchPolicy)
def test_request_waits_for_its_turn_where_there_is_no_host_tier(
    make_world: MakeWorld, policy: PrefetchPolicy
) -> None:
    """There is nothing to read, so there is no wait, and nothing is held."""
    world = make_world(host_blocks=0, prefetch_policy=policy)
    world.serve(LONG_A)
    prefetch = world.prefetch(LONG_A)
    assert prefetch is not None
    assert prefetch.ready
    assert not world.cache.is_worth_waiting(prefetch)
    assert hits(world, LONG_A) == {DEVICE: 4}
    world.end_prefetch(prefetch)
    world.check()
