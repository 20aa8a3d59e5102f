"""The embedded cache uses a tier again that was slow for a moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.core.types import DEVICE, DISK, HOST, Direct
from kvtier.plan import Route
from kvtier.tiers import StorageFacts

from .world import GROUP, World, count

MakeWorld = Callable[..., World]
NUM_BLOCKS = 4
DIRECT = StorageFacts(finds_at_once=True, direct=Direct.ON)
ROUTES: dict[str, tuple[Route, dict[str, object]]] = {
    "host": ((HOST, DEVICE), {}),
    "disk": ((DISK, HOST), {"host_blocks": 6, "disk_blocks": 200}),
    "host below a disk": ((HOST, DEVICE), {"host_blocks": 6, "disk_blocks": 200}),
    "direct": (
        (DISK, DEVICE),
        {"host_blocks": 6, "disk_blocks": 200, "storage_facts": DIRECT},
    ),
}


def prompt(number: int) -> list[int]:
    return [number] * (2 * NUM_BLOCKS) + [999]


@pytest.mark.parametrize("kind", ROUTES)
def test_slow_copies_keep_a_tier_from_being_read_for_few_prompts(
    make_world: MakeWorld, kind: str
) -> None:
    route, options = ROUTES[kind]
    world = make_world(**{"host_blocks": 200, **options})
    numbers = range(1, 31)
    for number in numbers:
        world.serve(prompt(number))
        world.clock.now += 1.0
    costs = world.cache._ladder.costs
    for _ in range(30):
        costs.observe_copy(route, NUM_BLOCKS * GROUP.bytes_per_block, 1e6)
    world.cache.observe_prefill(0, 1000, 1000.0)
    num_loaded = []
    for number in numbers:
        world.lose_the_device()
        world.clock.now += 0.1
        request = world.start(prompt(number))
        num_loaded.append(sum(request.lease.record.hit_blocks.values()))
        world.finish(request)
    assert num_loaded[0] == 0, "nothing was slow"
    assert num_loaded[20:] == [NUM_BLOCKS] * 10
    if kind != "disk":  # an idle disk prefetches a piece for each prompt anyway
        assert count(world.cache.metrics, "kvtier_probed_blocks_total", src=route[0]) > 0


def test_a_request_does_not_wait_for_blocks_that_are_read_beside_it(make_world: MakeWorld) -> None:
    """It is fetched again while its own first blocks are being read from the slow disk."""
    world = make_world(host_blocks=6, disk_blocks=200)
    for number in (1, 2, 3):
        world.serve(prompt(number))
    world.lose_the_device()
    costs = world.cache._ladder.costs
    for route in ((DISK, HOST), (HOST, DEVICE)):
        for _ in range(5):
            costs.observe_copy(route, NUM_BLOCKS * GROUP.bytes_per_block, 1e6)
    world.cache.observe_prefill(0, 1000, 1.0)
    world.clock.now += 10.0
    assert world.storage is not None
    world.storage.open_reads.clear()
    first, again = world.ask(prompt(1)), world.ask(prompt(1))
    assert world.storage.is_reading.wait(60)
    for request in (first, again):
        assert request.lease.ready
        assert request.lease.num_shared == 0
    world.open_storage()
    assert world.cache.drain()
