"""The embedded cache uses a tier again that was slow for a moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.core.types import DEVICE, DISK, HOST, Direct
from kvtier.plan import Route
from kvtier.tiers import StorageFacts

from .harness import GROUP, Harness, count

MakeHarness = Callable[..., Harness]
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
    make_harness: MakeHarness, kind: str
) -> None:
    route, options = ROUTES[kind]
    harness = make_harness(**{"host_blocks": 200, **options})
    numbers = range(1, 31)
    for number in numbers:
        harness.serve(prompt(number))
        harness.clock.now += 1.0
    costs = harness.cache._ladder.costs
    for _ in range(30):
        costs.observe_copy(route, NUM_BLOCKS * GROUP.bytes_per_block, 1e6)
    harness.cache.observe_prefill(0, 1000, 1000.0)
    num_loaded = []
    for number in numbers:
        harness.lose_the_device()
        harness.clock.now += 0.1
        request = harness.start(prompt(number))
        num_loaded.append(sum(request.lease.record.hit_blocks.values()))
        harness.finish(request)
    assert num_loaded[0] == 0, "nothing was slow"
    assert num_loaded[20:] == [NUM_BLOCKS] * 10
    if kind != "disk":  # an idle disk prefetches a piece for each prompt anyway
        assert count(harness.cache.metrics, "kvtier_probed_blocks_total", src=route[0]) > 0


def test_a_request_does_not_wait_for_blocks_that_are_read_beside_it(
    make_harness: MakeHarness,
) -> None:
    """It is fetched again while its own first blocks are being read from the slow disk."""
    harness = make_harness(host_blocks=6, disk_blocks=200)
    for number in (1, 2, 3):
        harness.serve(prompt(number))
    harness.lose_the_device()
    costs = harness.cache._ladder.costs
    for route in ((DISK, HOST), (HOST, DEVICE)):
        for _ in range(5):
            costs.observe_copy(route, NUM_BLOCKS * GROUP.bytes_per_block, 1e6)
    harness.cache.observe_prefill(0, 1000, 1.0)
    harness.clock.now += 10.0
    assert harness.storage is not None
    harness.storage.open_reads.clear()
    first, again = harness.ask(prompt(1)), harness.ask(prompt(1))
    assert harness.storage.is_reading.wait(60)
    for request in (first, again):
        assert request.lease.ready
        assert request.lease.num_shared == 0
    harness.open_storage()
    assert harness.cache.drain()
