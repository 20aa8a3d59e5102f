"""The live policy on runs.

Its choices, made step by step, equal those of a replay of whole requests. No sequence of calls
breaks it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtier.core import hot
from kvtier.index.policies.live import LivePolicy
from kvtier.index.policies.replayed import PolicyReplay
from tests.index.policies.live_tier import Tier, names
from tests.index.policies.traffic import CAPACITY, TRAFFIC, prompt

Make = Callable[..., Any]
NOTHING = np.zeros(0, np.uint64)
HARD = ("scan_flood", "reversed_habits", "stack", "one_million_tokens", "tenants")
MAX_BELOW = 0.003
"""Maximum share of the requested blocks by which a policy may find less than LRU."""
native = pytest.mark.skipif(not hot.NATIVE, reason=f"no native core: {hot.NATIVE_REASON}")


@pytest.fixture(scope="module")
def make() -> Make:
    module = pytest.importorskip("kvtier._native", reason="the core is not built")
    made: Make = module.LivePolicy
    return made


def test_what_is_asked_for_is_found_as_far_as_it_was_stored(make: Make) -> None:
    policy = make(20)
    path = names(prompt(1, 8))
    assert policy.asked(path, 0.0) == 0
    policy.entered(path[:5])
    assert policy.asked(path, 1.0) == 5
    policy.entered(path)
    assert policy.asked(path, 2.0) == 8
    assert policy.num_blocks() == 8
    policy.check_invariants()


def test_what_a_prompt_has_does_not_leave_for_what_it_brings(make: Make) -> None:
    """A request's new blocks do not evict its found blocks, although no lease holds them.

    The deep blocks are worth far more than those in front, and nothing without them.
    """
    policy = make(20, 7, 1.0)
    for turn in range(400):  # a prompt that grows, then starts again
        path = names(prompt(turn // 4, 10 * (1 + turn % 4)))
        num_there = policy.asked(path, float(turn))
        new = path[num_there:]
        num = policy.admits(new, NOTHING)
        left = policy.victims(num - (20 - policy.num_blocks()), NOTHING)
        assert turn < 100 or not set(left) & set(path[:num_there].tolist())
        policy.entered(new[: min(num, 20 - policy.num_blocks())])
    policy.check_invariants()


def test_a_prompt_leaves_from_its_end_and_what_is_kept_stays(make: Make) -> None:
    policy = make(20)
    first, second = names(prompt(1, 8)), names(prompt(2, 8))
    for now, path in enumerate((first, second)):
        policy.asked(path, float(now))
        policy.entered(path)
    assert policy.victims(3, NOTHING) == first[:4:-1].tolist()
    assert policy.victims(3, first[4:5]) == second[:4:-1].tolist()
    assert policy.victims(50, first[:5]) == second[4::-1].tolist()
    assert policy.asked(first, 2.0) == 5
    policy.check_invariants()


def test_blocks_of_an_answer_leave_before_what_they_lie_behind(make: Make) -> None:
    policy = make(20)
    path = names(prompt(1, 7))
    policy.asked(path[:4], 0.0)
    policy.entered(path[:4])
    for end in (5, 6, 7):  # as it is made
        policy.entered(path[end - 2 : end])
    assert policy.asked(path, 1.0) == 7
    policy.check_invariants()
    assert policy.victims(4, NOTHING) == path[:2:-1].tolist()


def test_what_nobody_has_asked_for_comes_to_its_place_when_somebody_does(make: Make) -> None:
    policy = make(20)
    path = names(prompt(1, 6))
    for at in (3, 0, 5, 1, 4, 2):
        policy.entered(path[at : at + 1])
        policy.check_invariants()
    assert policy.asked(path, 1.0) == 6
    policy.check_invariants()
    assert policy.victims(9, NOTHING) == path[::-1].tolist()


def test_a_block_that_is_lost_takes_nothing_with_it(make: Make) -> None:
    policy = make(20)
    path = names(prompt(1, 9))
    policy.asked(path, 0.0)
    policy.entered(path)
    policy.left(path[3:5])
    policy.check_invariants()
    assert policy.num_blocks() == 7
    assert policy.asked(path, 1.0) == 3
    policy.entered(path[3:5])
    policy.check_invariants()
    assert policy.asked(path, 2.0) == 9
    policy.check_invariants()
    assert policy.victims(9, NOTHING) == path[::-1].tolist()
    assert policy.num_blocks() == 0


def test_a_block_behind_a_gap_stays_where_it_is(make: Make) -> None:
    """Block 3 remains in the tier and evictable, although block 2 in front of it was evicted."""
    policy = make(8)

    def path(*blocks: int) -> np.ndarray:
        return np.array(blocks, np.uint64)

    policy.asked(path(1, 2, 3), 0.0)
    policy.entered(path(1, 2, 3))
    policy.left(path(2))
    policy.asked(path(1, 2, 3, 5, 6, 7), 1.0)
    policy.entered(path(2, 5, 6, 7))
    assert policy.victims(2, path(3, 5, 6, 7)) == [2, 1]
    assert policy.victims(3, path(3)) == [7, 6, 5]
    assert policy.asked(path(1, 2, 3, 5, 14), 2.0) == 0
    policy.check_invariants()
    assert policy.num_blocks() == 1
    assert policy.victims(1, NOTHING) == [3]


def test_a_full_tier_takes_nothing_in(make: Make) -> None:
    policy = make(3)
    path = names(prompt(1, 4))
    policy.asked(path, 0.0)
    policy.entered(path[:3])
    with pytest.raises(ValueError, match="room for 3 blocks, and all of it is used"):
        policy.entered(path[3:])
    assert policy.num_blocks() == 3
    policy.check_invariants()


def test_bad_arguments_are_told(make: Make) -> None:
    policy = make(5)
    path = names(prompt(1, 3))
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: make(0), ValueError, "0 is not in 1 .."),
        (lambda: make(5, 7, -1.0), ValueError, "doubles_at_blocks must be 0 or"),
        (lambda: policy.asked(path, float("nan")), ValueError, "finite number of seconds"),
        (
            lambda: policy.asked(path[[0, 1, 0]], 0.0),
            ValueError,
            "no two of a prompt are alike",
        ),
        (lambda: policy.entered([1]), TypeError, "keys must be an array of uint64"),
        (lambda: policy.victims(1, path[::2]), ValueError, "C-contiguous"),
    ]
    for call, error, text in wrong:
        with pytest.raises(error, match=text):
            call()
    assert policy.num_blocks() == 0


# -- compared with a replay ------------------------------------------------------------------------


@native
@pytest.mark.parametrize("traffic", HARD)
def test_live_it_finds_what_it_finds_in_a_replay_and_no_less_than_lru(traffic: str) -> None:
    tier = Tier(LivePolicy(CAPACITY)._core, CAPACITY)
    replayed = {name: PolicyReplay(name, CAPACITY) for name in ("runs", "lru")}
    num_refs = live = 0
    hits = dict.fromkeys(replayed, 0)
    for now, keys in TRAFFIC[traffic](np.random.default_rng(1)):
        num_refs += len(keys)
        live += tier.request(keys, now)
        for name, replay in replayed.items():
            hits[name] += replay.request(keys, now)
    tier.policy.check_invariants()
    told = {name: f"{100 * num / num_refs:.2f} %" for name, num in {"live": live, **hits}.items()}
    assert live >= hits["lru"] - MAX_BELOW * num_refs, told
    assert live >= hits["runs"] - 0.01 * num_refs, told


@native
def test_prompts_that_nobody_repeats_are_not_let_in_once_that_is_known() -> None:
    tier = Tier(LivePolicy(100)._core, 100)
    for now in range(1000):
        tier.request(prompt(now % 4, 20), float(now))
        stored = tier.num_stored
        tier.request(prompt(1000 + now, 20), now + 0.5)
        if now > 500:
            assert tier.num_stored - stored <= 20
    assert tier.num_stored < 0.5 * 1000 * 20


@pytest.mark.parametrize("share", [0.5, 0.95, 0.999, 1.0])
def test_where_most_is_held_the_rest_leaves_and_nothing_else(make: Make, share: float) -> None:
    chance = np.random.default_rng(3)
    tier = Tier(make(2000, 1), 2000)
    for at in range(400):  # some prompts are requested again, so the policy can learn
        for number in (at, max(0, at - 5)):
            tier.request(names(prompt(number, 4)), float(at))
    for at in range(1000, 1400):
        tier.request(names(prompt(at, 1)), float(at))
    blocks = np.array(sorted(tier.blocks), np.uint64)
    held = blocks[chance.random(len(blocks)) < share]
    num_free_to_go = len(blocks) - len(held)
    left = tier.lose(len(blocks), held)
    # A block in front of a held block stays, too.
    assert len(left) <= num_free_to_go
    assert bool(left) == bool(num_free_to_go)
    assert not tier.lose(1, held)
    tier.policy.check_invariants()
