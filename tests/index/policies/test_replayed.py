"""Replayed policies: rules for all of them, and each list policy compared with its oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.index.policies.replayed import POLICIES, PolicyReplay
from tests.index.policies.oracle import ORACLES
from tests.index.policies.traffic import prompt

Make = Callable[..., Any]
KNOW_PATHS = ("runs", "lru", "lfuda")
"""Policies that see prompts. The others see single blocks."""


@pytest.fixture(scope="module")
def make() -> Make:
    module = pytest.importorskip("kvtier._native", reason="the core is not built")
    made: Make = module.PolicyReplay
    return made


def keys(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_is_found_as_far_as_it_is_the_same(make: Make, policy: str) -> None:
    replay = make(policy, 20)
    assert replay.request(keys(1, 2, 3, 4), 0.0) == 0
    assert (replay.num_blocks(), replay.num_stored()) == (4, 4)
    assert replay.request(keys(1, 2, 3, 4), 1.0) == 4
    assert replay.request(keys(1, 2, 9, 4), 2.0) == 2
    assert replay.request(keys(2, 3, 4), 3.0) == 0
    assert replay.request(keys(1, 2), 4.0) == 2
    assert (replay.num_blocks(), replay.num_stored()) == (9, 9)
    replay.check_invariants()


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_blocks_in_a_row_are_different_blocks(make: Make, policy: str) -> None:
    replay = make(policy, 20)
    assert replay.request(keys(0, 0, 0), 0.0) == 0
    assert replay.num_blocks() == 3
    assert replay.request(keys(0, 0, 0, 0), 1.0) == 3


@pytest.mark.parametrize("policy", KNOW_PATHS)
def test_a_prompt_that_does_not_fit_is_kept_from_its_beginning(make: Make, policy: str) -> None:
    replay = make(policy, 5)
    for now in range(3):
        assert replay.request(prompt(1, 8), float(now)) == (5 if now else 0)
        assert replay.num_blocks() == 5
    assert replay.num_stored() == 5
    replay.check_invariants()


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_asked_for(make: Make, policy: str) -> None:
    replay = make(policy, 1)
    assert replay.request(keys(), 0.0) == 0
    assert replay.request(keys(1), 0.0) == 0
    assert replay.request(keys(2), 0.0) == 0
    assert replay.request(keys(), 1.0) == 0
    assert replay.num_blocks() == 1


def test_lru_loses_what_was_used_least_recently_and_ends_before_beginnings(make: Make) -> None:
    replay = make("lru", 6)
    replay.request(prompt(1, 3), 0.0)
    replay.request(prompt(2, 3), 1.0)
    replay.request(prompt(1, 1), 2.0)
    replay.request(prompt(3, 3), 3.0)
    assert replay.request(prompt(1, 3), 4.0) == 1
    # Prompt 1's other blocks are evicted first, then 2's last; then two more of 2's.
    assert replay.request(prompt(2, 3), 5.0) == 0


def test_a_request_never_loses_blocks_of_its_own(make: Make) -> None:
    """Its prefix is the least recently used, and its new blocks need all other space."""
    for policy in KNOW_PATHS:
        replay = make(policy, 20)
        replay.request(prompt(1, 10), 0.0)
        replay.request(prompt(2, 10), 60.0)
        assert replay.request(prompt(1, 20), 120.0) == 10
        assert replay.request(prompt(1, 20), 121.0) == 20
        assert replay.num_stored() == 30


def test_bad_arguments_are_told(make: Make) -> None:
    replay = make("runs", 5)
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: make("best", 5), ValueError, "no policy is called 'best'"),
        (lambda: make("lru", 0), ValueError, "0 is not in 1 .."),
        (lambda: make("lru", 1 << 40), ValueError, "is not in 1 .."),
        (lambda: make("runs", 5, 7, -1.0), ValueError, "doubles_at_blocks must be 0 or"),
        (lambda: make("runs", 5, 7, float("nan")), ValueError, "doubles_at_blocks must be 0 or"),
        (lambda: replay.request(keys(1), float("nan")), ValueError, "finite number of seconds"),
        (lambda: replay.request(keys(1), float("inf")), ValueError, "finite number of seconds"),
        (lambda: replay.request([1], 0.0), TypeError, "keys must be an array of uint64"),
        (lambda: replay.request(np.zeros(2), 0.0), TypeError, "keys must be an array of uint64"),
        (lambda: replay.request(np.zeros((1, 2), np.uint64), 0.0), ValueError, "one dimension"),
        (lambda: replay.request(prompt(1, 8)[::2], 0.0), ValueError, "C-contiguous"),
    ]
    for call, error, text in wrong:
        with pytest.raises(error, match=text):
            call()
    assert (replay.num_blocks(), replay.num_stored()) == (0, 0)


def test_an_unknown_policy_is_told_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="no policy is called 'best'; there are runs, lru, arc"):
        PolicyReplay("best", 5)


@pytest.mark.parametrize("policy", POLICIES)
def test_time_that_runs_backwards_stands_still(make: Make, policy: str) -> None:
    jumps, stands_still = make(policy, 12), make(policy, 12)
    latest = 0.0
    for step in range(300):
        now = step - 50.0 * (step % 3 > 0)
        latest = max(latest, now)
        path = prompt(step * step % 11, 3)
        assert jumps.request(path, now) == stands_still.request(path, latest)
        jumps.check_invariants()


# -- compared with the oracle ----------------------------------------------------------------------

Request = tuple[int, int, int]
"""Number of a prompt, how many leading blocks it shares with prompt 0, and how many follow."""

requests = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 6), st.integers(0, 24)), max_size=150
)


@pytest.mark.parametrize("policy", ORACLES)
@given(asked=requests, capacity=st.integers(1, 60))
def test_list_policies_choose_as_their_oracles(
    make: Make, policy: str, asked: list[Request], capacity: int
) -> None:
    replay, oracle = make(policy, capacity), ORACLES[policy](capacity)
    for now, (number, shared, length) in enumerate(asked):
        path = np.concatenate([prompt(0, shared), prompt(number, length)])
        assert replay.request(path, float(now)) == oracle.request(path.tolist())
        assert replay.num_blocks() == len(oracle.resident())
        assert replay.num_stored() == oracle.num_stored
        assert replay.num_history() == oracle.num_history
    replay.check_invariants()


@pytest.mark.parametrize("policy", ORACLES)
@pytest.mark.parametrize("capacity", [30, 200])
def test_list_policies_choose_as_their_oracles_where_histories_are_full(
    make: Make, policy: str, capacity: int
) -> None:
    chance = np.random.default_rng(capacity)
    replay, oracle = make(policy, capacity), ORACLES[policy](capacity)
    for now in range(600):
        number = int(chance.zipf(1.3)) % 100 if now % 3 else 10_000 + now
        path = np.concatenate([prompt(0, int(chance.integers(6))), prompt(number, 4)])
        assert replay.request(path, float(now)) == oracle.request(path.tolist()), now
        assert replay.num_history() == oracle.num_history


@given(asked=requests, capacity=st.integers(1, 60), seed=st.integers(0, 2**64 - 1))
def test_the_learned_policy_keeps_its_bounds(
    make: Make, asked: list[Request], capacity: int, seed: int
) -> None:
    replay = make("runs", capacity, seed)
    for now, (number, shared, length) in enumerate(asked):
        path = np.concatenate([prompt(0, shared), prompt(number, length)])
        found = replay.request(path, float(now))
        assert 0 <= found <= min(len(path), capacity)
        assert replay.num_blocks() <= capacity
        assert replay.num_history() <= 2 * capacity
        replay.check_invariants()
