"""Hundreds of requests with free-running copies: threads choose the order, not the test."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvtier.core.types import DEVICE, DISK, HOST, WritePolicy
from kvtier.devices import Direction
from kvtier.index.policies.replayed import POLICIES
from tests.cache.tokens.world import World, count

NAMESPACES = (b"one", b"two")


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("host_blocks", [3, 40])
@pytest.mark.parametrize("layout", ["layer_first", "page_head"])
def test_many_requests_get_the_right_bytes_and_leak_nothing(
    make_world: Callable[..., World], policy: WritePolicy, host_blocks: int, layout: str
) -> None:
    world = make_world(policy, host_blocks=host_blocks, device_blocks=24, layout=layout)
    ask_for_many(world, random.Random(host_blocks))
    if policy is WritePolicy.WRITE_THROUGH and host_blocks == 40:  # capacity for all requests
        assert count(world.cache.metrics, "kvtier_hit_blocks_total", tier=HOST) > 0


@pytest.mark.parametrize("eviction", [policy for policy in POLICIES if policy != "runs"])
def test_so_it_is_whatever_decides_on_what_leaves(
    make_world: Callable[..., World], eviction: str
) -> None:
    world = make_world(host_blocks=12, disk_blocks=20, device_blocks=24, eviction_policy=eviction)
    ask_for_many(world, random.Random(1))
    for tier in (HOST, DISK):
        assert count(world.cache.metrics, "kvtier_evicted_blocks_total", tier=tier) > 0


def ask_for_many(world: World, rng: random.Random) -> None:
    num_done = num_refused = 0
    while num_done < 150:
        world.cache.poll()
        if len(world.requests) < 4:
            fork = rng.choice([0, 4, 7, 12])
            tokens = [1 if at < fork else 2 for at in range(rng.randrange(13))]
            request = world.fetch(tokens, namespace=rng.choice(NAMESPACES))
            num_refused += request is None
        if rng.random() < 0.05:
            world.device.fail_half_way(rng.choice(list(Direction)))
        if rng.random() < 0.1:
            world.cache.clear(rng.choice([DEVICE, DEVICE, HOST]))
        if not world.requests:
            continue
        request = rng.choice(world.requests)
        if request.lease.broken or rng.random() < 0.1:
            world.release(request)
        elif request.lease.ready:
            world.check_request(request)
            world.compute(request, len(request.labels))
            world.cache.commit(request.lease, len(request.labels))
            world.check_request(request)
            world.release(request)
            num_done += 1
        world.check()
    assert count(world.cache.metrics, "kvtier_hit_blocks_total", tier=DEVICE) > 0
    assert num_refused < num_done
