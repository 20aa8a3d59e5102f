"""Queue policies in a tier: their strengths, and their hits compared with a replay."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.cache.assembly import policy_maker
from kvtier.core import hot
from kvtier.core.types import HOST
from kvtier.index.native_index import NativeIndex
from kvtier.index.native_key_index import NativeKeyIndex
from kvtier.index.policies.replayed import POLICIES, PolicyReplay
from tests.index.learning import KeyHost
from tests.index.policies.traffic import CAPACITY, TRAFFIC, prompt

QUEUES = ("arc", "s3fifo", "lfuda", "sieve")
pytestmark = pytest.mark.skipif(not hot.NATIVE, reason=f"no native core: {hot.NATIVE_REASON}")
MAX_BELOW = 0.02
"""Maximum share of the requested blocks by which a tier may find less than a replay. A tier evicts
a block only after those behind it, and frees space for a whole request beforehand."""


def test_what_can_be_replayed_can_be_chosen_in_a_tier() -> None:
    for name in POLICIES:
        assert policy_maker(name)(HOST) == name
        assert NativeIndex({HOST: name}).describe() == f"native, {name}"
        assert NativeKeyIndex({HOST: name}, lambda: b"").describe() == f"native, by key, {name}"
    with pytest.raises(ValueError, match="no policy is called 'best'; there are runs, lru, arc"):
        NativeKeyIndex({HOST: "best"}, lambda: b"")
    with pytest.raises(ValueError, match="no policy is called 'best'"):
        NativeIndex({HOST: "best"})


@pytest.mark.parametrize("policy", QUEUES)
def test_what_is_used_again_outlives_what_is_not(policy: str) -> None:
    """The flood is larger than the tier, and none of its prompts is repeated."""
    hits = {}
    for name in (policy, "lru"):
        host = KeyHost(name, 100)
        for now in range(4):
            host.request(prompt(1, 20), float(now))
        for now in range(4, 10):
            host.request(prompt(now, 20), float(now))
        hits[name] = host.request(prompt(1, 20), 10.0)
        host.index.check_invariants()
    assert hits == {policy: 20, "lru": 0}


@pytest.mark.parametrize("policy", QUEUES)
def test_what_was_held_when_its_turn_came_leaves_when_it_is_let_go(policy: str) -> None:
    host = KeyHost(policy, 12)
    for number in (1, 2, 3):
        host.request(prompt(number, 4), float(number))
    held = host.blocks(prompt(1, 4))
    host.index.lease(held, HOST)
    assert len(host.evict(4)) == 4
    host.index.check_invariants()
    host.index.release(held, HOST)
    host.index.check_invariants()
    assert host.evict(2) == held[:1:-1]


@pytest.mark.parametrize("policy", QUEUES)
def test_less_room_makes_it_forget(policy: str) -> None:
    """History is at most twice the capacity: `check_invariants` checks that."""
    host = KeyHost(policy, 100)
    for now in range(30):
        host.request(prompt(now % 12, 15), float(now))
    for num_blocks in (40, 3, 1):
        host.index.set_room(HOST, num_blocks)
        host.index.check_invariants()
        host.evict(host.index.num_held(HOST) - num_blocks)
        host.index.check_invariants()
    assert host.index.num_held(HOST) == 1


@pytest.mark.parametrize("traffic", ["scan_flood", "reversed_habits", "stack", "tenants"])
@pytest.mark.parametrize("policy", QUEUES)
def test_in_a_tier_it_finds_what_it_finds_in_a_replay(policy: str, traffic: str) -> None:
    host, replay = KeyHost(policy, CAPACITY), PolicyReplay(policy, CAPACITY)
    asked = found = replayed = 0
    for now, keys in TRAFFIC[traffic](np.random.default_rng(1)):
        asked += len(keys)
        found += host.request(keys, now)
        replayed += replay.request(keys, now)
    host.index.check_invariants()
    assert found >= replayed - MAX_BELOW * asked, f"{found} of {asked}, replayed {replayed}"
