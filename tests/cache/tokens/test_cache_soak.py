"""Hundreds of requests with free-running copies: threads choose the order, not the test."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvtier.core.types import DEVICE, DISK, HOST, WritePolicy
from kvtier.devices import Direction
from kvtier.index.policies.replayed import POLICIES
from tests.cache.tokens.harness import Harness, count

NAMESPACES = (b"one", b"two")


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("host_blocks", [3, 40])
@pytest.mark.parametrize("layout", ["layer_first", "page_head"])
def test_many_requests_get_the_right_bytes_and_leak_nothing(
    make_harness: Callable[..., Harness], policy: WritePolicy, host_blocks: int, layout: str
) -> None:
    harness = make_harness(policy, host_blocks=host_blocks, device_blocks=24, layout=layout)
    ask_for_many(harness, random.Random(host_blocks))
    if policy is WritePolicy.WRITE_THROUGH and host_blocks == 40:  # capacity for all requests
        assert count(harness.cache.metrics, "kvtier_hit_blocks_total", tier=HOST) > 0


@pytest.mark.parametrize("eviction", [policy for policy in POLICIES if policy != "runs"])
def test_so_it_is_whatever_decides_on_what_leaves(
    make_harness: Callable[..., Harness], eviction: str
) -> None:
    harness = make_harness(
        host_blocks=12, disk_blocks=20, device_blocks=24, eviction_policy=eviction
    )
    ask_for_many(harness, random.Random(1))
    for tier in (HOST, DISK):
        assert count(harness.cache.metrics, "kvtier_evicted_blocks_total", tier=tier) > 0


def ask_for_many(harness: Harness, rng: random.Random) -> None:
    num_done = num_refused = 0
    while num_done < 150:
        harness.cache.poll()
        if len(harness.requests) < 4:
            fork = rng.choice([0, 4, 7, 12])
            tokens = [1 if at < fork else 2 for at in range(rng.randrange(13))]
            request = harness.fetch(tokens, namespace=rng.choice(NAMESPACES))
            num_refused += request is None
        if rng.random() < 0.05:
            harness.device.fail_half_way(rng.choice(list(Direction)))
        if rng.random() < 0.1:
            harness.cache.clear(rng.choice([DEVICE, DEVICE, HOST]))
        if not harness.requests:
            continue
        request = rng.choice(harness.requests)
        if request.lease.broken or rng.random() < 0.1:
            harness.release(request)
        elif request.lease.ready:
            harness.check_request(request)
            harness.compute(request, len(request.labels))
            harness.cache.commit(request.lease, len(request.labels))
            harness.check_request(request)
            harness.release(request)
            num_done += 1
        harness.check()
    assert count(harness.cache.metrics, "kvtier_hit_blocks_total", tier=DEVICE) > 0
    assert num_refused < num_done
