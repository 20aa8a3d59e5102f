"""The learned policy is not worse than LRU, and its memory is bounded."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.core import hot
from kvtier.index.policies.replayed import PolicyReplay
from tests.index.policies.traffic import CAPACITY, TRAFFIC

pytestmark = pytest.mark.skipif(not hot.NATIVE, reason=f"no native core: {hot.NATIVE_REASON}")

MAX_BELOW = 0.003
"""Maximum share of the requested blocks by which a policy may find less than LRU."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("traffic", TRAFFIC)
def test_runs_are_never_clearly_below_lru(traffic: str, seed: int) -> None:
    runs, lru = PolicyReplay("runs", CAPACITY, seed=seed), PolicyReplay("lru", CAPACITY)
    num_refs = num_hits = num_lru_hits = most_history = 0
    for now, keys in TRAFFIC[traffic](np.random.default_rng(seed)):
        num_hits += runs.request(keys, now)
        num_lru_hits += lru.request(keys, now)
        num_refs += len(keys)
        most_history = max(most_history, runs.num_history)
    runs.check_invariants()
    assert num_hits >= num_lru_hits - MAX_BELOW * num_refs, (
        f"{100 * num_hits / num_refs:.2f} %, LRU {100 * num_lru_hits / num_refs:.2f} %"
    )
    assert most_history <= 2 * CAPACITY


@pytest.mark.parametrize("traffic", ["scan_flood", "loop_over_capacity", "tenants"])
def test_what_lru_loses_to_a_flood_is_kept(traffic: str) -> None:
    """The learned policy finds blocks that LRU has evicted."""
    hits = dict.fromkeys(("runs", "lru"), 0)
    for policy in hits:
        replay = PolicyReplay(policy, CAPACITY)
        for now, keys in TRAFFIC[traffic](np.random.default_rng(1)):
            hits[policy] += replay.request(keys, now)
    assert hits["runs"] > 1.2 * hits["lru"], hits


def test_history_and_memory_stay_bounded_in_a_long_life() -> None:
    """After ten thousand prompts of many lengths, ten thousand more need no further memory."""
    chance = np.random.default_rng(5)
    replay = PolicyReplay("runs", CAPACITY)
    sizes = []
    for now in range(20_000):
        number = int(chance.integers(3000)) + now // 5 * 10
        keys = np.arange(1 + number % 97, dtype=np.uint64) + np.uint64(number << 24)
        replay.request(keys, float(now))
        assert replay.num_history <= 2 * CAPACITY
        if now % 5000 == 4999:
            sizes.append(replay.num_bytes)
    replay.check_invariants()
    assert sizes[-1] <= 1.25 * sizes[1], sizes
