"""Our eviction policies, by the suite that every policy has to pass, and by what is special."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.index.policies import EvictionPolicy, LruPolicy
from kvtier.testing import PolicySuite
from kvtier.types import BlockId


class TestLruPolicy(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return LruPolicy()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_lru_gives_the_least_recently_used_candidate(uses: list[int]) -> None:
    policy = LruPolicy()
    last_use: dict[int, int] = {}
    for now, block in enumerate(uses):
        policy.touch(BlockId(block), float(now))
        policy.add(BlockId(block))
        last_use[block] = now
    victims = []
    while (victim := policy.victim()) is not None:
        victims.append(victim)
        policy.forget(victim)
    assert victims == sorted(last_use, key=last_use.__getitem__)


def test_lru_keeps_its_heap_small() -> None:
    policy = LruPolicy()
    for now in range(10_000):
        policy.touch(BlockId(now % 4), float(now))
        policy.add(BlockId(now % 4))
    assert len(policy._heap) <= 64 + 2 * 4 + 1
    assert policy.victim() == 10_000 % 4
