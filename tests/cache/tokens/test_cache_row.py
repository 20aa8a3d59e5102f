"""Ladders without a host tier, with several storage tiers, and with remote ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.core.errors import ConfigError
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.testing import MemoryStorage, StoredBlocks
from kvtier.tiers import StorageFacts

from .harness import GROUP, A, Harness, Request, until

MakeHarness = Callable[..., Harness]
LONG = [*A, 9]
"""Four blocks that can be reused, and a token left to compute."""


def hits(request: Request) -> dict[str, int]:
    return request.lease.record.hit_blocks


def test_without_a_host_tier_storage_serves_the_device(make_harness: MakeHarness) -> None:
    """Storage that reads and writes device memory directly serves it."""
    shelf = StoredBlocks()
    earlier = make_harness(disk_blocks=30, host_blocks=0, shelf=shelf)
    earlier.serve(LONG)
    assert len(shelf.blocks) == 4
    earlier.lose_the_device()
    assert earlier.matched(LONG) == [DISK] * 4
    harness = make_harness(disk_blocks=30, host_blocks=0, shelf=shelf)
    request = harness.start(LONG)
    assert hits(request) == {DISK: 4}
    harness.finish(request)
    assert harness.matched(LONG) == [DEVICE] * 4


def test_storage_that_does_not_reach_the_device_needs_a_host_tier(
    make_harness: MakeHarness,
) -> None:
    facts = StorageFacts(reaches=frozenset({"elsewhere"}), finds_at_once=True)
    with pytest.raises(ConfigError, match="host_capacity: the disk tier does not reach host mem"):
        make_harness(disk_blocks=5, host_blocks=0, storage_facts=facts)


def test_a_look_up_that_takes_its_time_is_for_the_next_request(make_harness: MakeHarness) -> None:
    shelf = StoredBlocks()
    make_harness(disk_blocks=30, shelf=shelf).serve(LONG)
    harness = make_harness(disk_blocks=30, shelf=shelf, storage_facts=StorageFacts())
    first = harness.ask(LONG)
    assert first.lease.num_shared == 0
    harness.release(first)
    assert harness.storage.was_asked.wait(60)
    until(harness, lambda: harness.matched(LONG) == [DISK] * 4)
    request = harness.start(LONG)
    assert hits(request) == {DISK: 4}
    harness.finish(request)


@pytest.mark.parametrize(("request_s", "num_loaded"), [(0.1, 4), (100.0, 0)])
def test_a_request_that_costs_more_than_computing_is_never_made(
    make_harness: MakeHarness, request_s: float, num_loaded: int
) -> None:
    """Nothing was read before, so the estimate is the latency that the storage reports."""
    shelf = StoredBlocks()
    make_harness(disk_blocks=30, shelf=shelf).serve(LONG)
    facts = StorageFacts(finds_at_once=True, request_s=request_s)
    harness = make_harness(disk_blocks=30, shelf=shelf, storage_facts=facts)
    harness.cache.observe_prefill(0, 1, 1.0)
    request = harness.start(LONG)
    assert hits(request) == ({DISK: num_loaded} if num_loaded else {})
    harness.finish(request)


def test_storage_tiers_stand_beside_each_other(make_harness: MakeHarness) -> None:
    """Every write goes to each storage tier. A hit in one never passes through another."""
    far = MemoryStorage(GROUP, 30, StoredBlocks(), "far")
    harness = make_harness(disk_blocks=30, more_storage=(far,))
    harness.serve(LONG)
    assert (harness.held(DISK), harness.held("far")) == (4, 4)
    harness.lose_the_device()
    harness.cache.clear(HOST)
    harness.cache.clear(DISK)
    assert harness.matched(LONG) == ["far"] * 4
    request = harness.start(LONG)
    assert hits(request) == {"far": 4}
    assert harness.held(DISK) == 0
    harness.finish(request)
