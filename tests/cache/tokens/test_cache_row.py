"""Ladders without a host tier, with several storage tiers, and with remote ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.core.errors import ConfigError
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.testing import MemoryStorage, StoredBlocks
from kvtier.tiers import StorageFacts

from .world import GROUP, A, Request, World, until

MakeWorld = Callable[..., World]
LONG = [*A, 9]
"""Four blocks that can be reused, and a token left to compute."""


def hits(request: Request) -> dict[str, int]:
    return request.lease.record.hit_blocks


def test_without_a_host_tier_storage_serves_the_device(make_world: MakeWorld) -> None:
    """Storage that reads and writes device memory directly serves it."""
    shelf = StoredBlocks()
    earlier = make_world(disk_blocks=30, host_blocks=0, shelf=shelf)
    earlier.serve(LONG)
    assert len(shelf.blocks) == 4
    earlier.lose_the_device()
    assert earlier.matched(LONG) == [DISK] * 4
    world = make_world(disk_blocks=30, host_blocks=0, shelf=shelf)
    request = world.start(LONG)
    assert hits(request) == {DISK: 4}
    world.finish(request)
    assert world.matched(LONG) == [DEVICE] * 4


def test_storage_that_does_not_reach_the_device_needs_a_host_tier(make_world: MakeWorld) -> None:
    facts = StorageFacts(reaches=frozenset({"elsewhere"}), finds_at_once=True)
    with pytest.raises(ConfigError, match="host_capacity: the disk tier does not reach host mem"):
        make_world(disk_blocks=5, host_blocks=0, storage_facts=facts)


def test_a_look_up_that_takes_its_time_is_for_the_next_request(make_world: MakeWorld) -> None:
    shelf = StoredBlocks()
    make_world(disk_blocks=30, shelf=shelf).serve(LONG)
    world = make_world(disk_blocks=30, shelf=shelf, storage_facts=StorageFacts())
    first = world.ask(LONG)
    assert first.lease.num_shared == 0
    world.release(first)
    assert world.storage.was_asked.wait(60)
    until(world, lambda: world.matched(LONG) == [DISK] * 4)
    request = world.start(LONG)
    assert hits(request) == {DISK: 4}
    world.finish(request)


@pytest.mark.parametrize(("request_s", "num_loaded"), [(0.1, 4), (100.0, 0)])
def test_a_request_that_costs_more_than_computing_is_never_made(
    make_world: MakeWorld, request_s: float, num_loaded: int
) -> None:
    """Nothing was read before, so the estimate is the latency that the storage reports."""
    shelf = StoredBlocks()
    make_world(disk_blocks=30, shelf=shelf).serve(LONG)
    facts = StorageFacts(finds_at_once=True, request_s=request_s)
    world = make_world(disk_blocks=30, shelf=shelf, storage_facts=facts)
    world.cache.observe_prefill(0, 1, 1.0)
    request = world.start(LONG)
    assert hits(request) == ({DISK: num_loaded} if num_loaded else {})
    world.finish(request)


def test_storage_tiers_stand_beside_each_other(make_world: MakeWorld) -> None:
    """Every write goes to each storage tier. A hit in one never passes through another."""
    far = MemoryStorage(GROUP, 30, StoredBlocks(), "far")
    world = make_world(disk_blocks=30, more_storage=(far,))
    world.serve(LONG)
    assert (world.held(DISK), world.held("far")) == (4, 4)
    world.lose_the_device()
    world.cache.clear(HOST)
    world.cache.clear(DISK)
    assert world.matched(LONG) == ["far"] * 4
    request = world.start(LONG)
    assert hits(request) == {"far": 4}
    assert world.held(DISK) == 0
    world.finish(request)
