"""A cache of blocks that a prompt needs only in front of a cut, with a learned policy.

Of most of a prompt's blocks, it has none: the state of recurrent layers is stored at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier.cache.block_cache import BlockState
from kvtier.cache.ladder import LadderOptions
from kvtier.cache.local import LocalBlockCache
from kvtier.cache.transfer.ranks import RankMover
from kvtier.core.hot import NATIVE, NATIVE_REASON
from kvtier.core.types import HOST
from kvtier.index import KeyIndex, make_key_index
from kvtier.index.native_key_index import NativeKeyIndex
from kvtier.index.policies.replayed import LRU, RUNS
from kvtier.tiers import DistantAllocator
from tests.index.indexes import LEARNING
from tests.index.test_key_index import KEYS, NS, TIERS, put
from tests.index.test_learning_keys import LearningMachine, left

pytestmark = pytest.mark.skipif(not NATIVE, reason=f"no native core: {NATIVE_REASON}")


@pytest.fixture(params=LEARNING)
def any_index(request: pytest.FixtureRequest) -> KeyIndex:
    index = NativeKeyIndex(dict.fromkeys(TIERS, request.param), lambda: NS)
    index.set_num_last(1)
    return index


class GapsMachine(LearningMachine):
    """Prompts of which two blocks are expected."""

    def __init__(self) -> None:
        super().__init__()
        self.index.set_num_last(2)


@pytest.mark.parametrize("policy", LEARNING)
def test_native_index_and_its_twin_do_the_same_with_gaps(policy: str) -> None:
    machine = type("Machine", (GapsMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=50, deadline=None))


def test_blocks_of_one_prompt_leave_from_its_end_in_spite_of_gaps(any_index: KeyIndex) -> None:
    for length in (2, 5, 8):
        any_index.on_request(KEYS[:length], float(length))
        put(any_index, KEYS[length - 1 : length])
        any_index.check_invariants()
    assert left(any_index, 9) == [KEYS[7], KEYS[4], KEYS[1]]


def test_each_tier_has_the_gaps_of_its_own(any_index: KeyIndex) -> None:
    for length in (2, 5):
        any_index.on_request(KEYS[:length], float(length))
        put(any_index, KEYS[length - 1 : length])
    put(any_index, KEYS[1:2], TIERS[1])
    assert left(any_index, 1) == [KEYS[4]]
    any_index.on_request(KEYS[:8], 9.0)  # the last block of eight is expected in both tiers
    for tier in TIERS[:2]:
        put(any_index, KEYS[7:8], tier)
        assert left(any_index, 9, tier) == [KEYS[7], KEYS[1]]
    any_index.check_invariants()


def serve(policy: str, prompts: Sequence[Sequence[bytes]]) -> list[bool]:
    """Return whether the state at the end of each prompt was found. There is room for eight."""
    now_s = 0.0
    host = DistantAllocator(8)
    host.open(8)
    index = make_key_index({HOST: policy}, lambda: NS)
    mover = RankMover({}, 1, 1, 1, 0.0, lambda: now_s)
    cache = LocalBlockCache(index, {HOST: host}, mover, LadderOptions(1), lambda: NS, lambda: now_s)
    cache.set_num_last(1)
    found = []
    for prompt in prompts:
        now_s += 1.0
        cache.on_request(prompt)
        found.append(cache.locate(prompt[-1]) is BlockState.MEMORY)
        if room := cache.reserve(prompt[-1:]):
            cache.commit(room.keys, [0] * len(room.keys))
        cache.touch(prompt[-1:])
        cache.take_changes()
    cache.check_invariants()
    index.check_invariants()
    return found


def test_states_of_a_conversation_that_comes_back_outlast_a_flood() -> None:
    fresh = iter(range(1000, 9999))

    def prompt(*numbers: int) -> list[bytes]:
        return [b"%04d" % number for number in numbers]

    prompts = []
    for _ in range(60):
        prompts.append(prompt(1, 2, 3, 4))
        prompts += [prompt(1, next(fresh), next(fresh)) for _ in range(10)]
    assert sum(serve(LRU, prompts)) == 0
    assert sum(serve(RUNS, prompts)) > 30
