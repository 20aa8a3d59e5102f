"""Retention hints on prompts: the eviction order, and the expiry of hints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.hints import END, MAX_TTL_S, OF_POLICIES, BlockHint, HintKind
from tests.index.policies.live_tier import Tier, names
from tests.index.policies.traffic import CAPACITY, TRAFFIC, Keys, prompt

Make = Callable[..., Any]
NOTHING = np.zeros(0, np.uint64)


@pytest.fixture(scope="module")
def make() -> Make:
    module = pytest.importorskip("kvtier._native", reason="the core is not built")
    made: Make = module.LivePolicy
    return made


def keep(level: int, until: float, first: int = 0, end: int = END) -> BlockHint:
    return BlockHint(HintKind.KEEP, level, first, end, until)


def word(kind: HintKind, until: float = 1000.0) -> BlockHint:
    return BlockHint(kind, 0, 0, END, until)


def store(policy: Any, path: Keys, now: float) -> Keys:
    policy.asked(path, now)
    policy.entered(path)
    return path


def some(policy: Any, num: int = 3, length: int = 6) -> list[Keys]:
    """Store prompts that share nothing. The first is the oldest."""
    return [store(policy, names(prompt(at + 1, length)), float(at)) for at in range(num)]


def test_what_has_a_higher_priority_leaves_after_what_has_a_lower_one(make: Make) -> None:
    policy = make(48)
    paths = some(policy, 4)
    for path, level in zip(paths, (90, 10, 60), strict=False):
        policy.retain(path, keep(level, 100.0), 5.0)
    left = policy.victims(24, NOTHING)
    assert left == [name for at in (1, 3, 2, 0) for name in paths[at][::-1].tolist()]
    policy.check_invariants()


def test_a_priority_is_over_after_its_time(make: Make) -> None:
    policy = make(40)
    first, second = some(policy, 2)
    policy.retain(first, keep(90, 100.0), 5.0)
    policy.retain(second, keep(10, 50.0), 5.0)
    policy.asked(names(prompt(9, 1)), 60.0)
    assert policy.victims(2, NOTHING) == second[:3:-1].tolist()
    policy.asked(names(prompt(9, 1)), 100.0)
    assert policy.victims(2, NOTHING) == first[:3:-1].tolist()
    policy.check_invariants()


def test_a_range_keeps_its_priority_when_the_prompt_is_used_again(make: Make) -> None:
    policy = make(60)
    system = prompt(1, 4)
    for number in (2, 3, 4):
        path = names(np.concatenate([system, prompt(number, 4)]))
        store(policy, path, float(number))
        if number == 2:
            policy.retain(path, keep(90, 1000.0, 0, 4), 2.0)
    others = [store(policy, names(prompt(10 + at, 6)), 10.0 + at) for at in range(3)]
    left = policy.victims(30, NOTHING)
    assert sorted(left) == sorted([*np.concatenate(others).tolist(), *left[:12]])
    assert policy.num_blocks() == 4
    assert policy.asked(names(system), 20.0) == 4
    policy.check_invariants()


def test_a_word_holds_for_what_is_still_to_come(make: Make) -> None:
    policy = make(40)
    path = names(prompt(1, 8))
    policy.asked(path, 0.0)
    policy.entered(path[:3])
    policy.retain(path, keep(90, 1000.0, 2, 6), 0.0)
    policy.check_invariants()
    policy.entered(path)
    other = store(policy, names(prompt(2, 4)), 1.0)
    policy.check_invariants()
    left = policy.victims(6, NOTHING)
    assert left == [*path[:5:-1].tolist(), *other[::-1].tolist()]
    policy.check_invariants()


def test_a_conversation_that_will_be_back_is_there_until_then(make: Make) -> None:
    policy = make(20)
    tier = Tier(policy, 20, check=True)
    talk = prompt(1, 5)
    tier.request(talk, 0.0)
    policy.retain(names(talk), word(HintKind.BACK, until=40.0), 0.0)
    for now in range(1, 30):
        tier.request(prompt(now + 1, 4), float(now))
    assert tier.request(talk, 30.0) == 5
    policy.retain(names(talk), word(HintKind.BACK, until=40.0), 30.0)
    for now in range(31, 60):
        tier.request(prompt(now + 1, 4), float(now))
    assert tier.request(talk, 60.0) == 0, "it was to be back long ago"


def test_back_is_over_when_it_is_back(make: Make) -> None:
    policy = make(40)
    first, second = some(policy, 2)
    policy.retain(first, word(HintKind.BACK), 2.0)
    policy.asked(first, 3.0)
    policy.asked(second, 4.0)
    assert policy.victims(1, NOTHING) == first[-1:].tolist()


def test_of_an_ended_session_only_what_is_its_own_leaves_first(make: Make) -> None:
    policy = make(60)
    system, one = prompt(1, 4), prompt(2, 3)
    first = names(np.concatenate([system, one]))
    store(policy, first, 0.0)
    second = store(policy, names(np.concatenate([system, prompt(3, 3)])), 1.0)
    longer = store(policy, names(np.concatenate([system, one, prompt(4, 2)])), 2.0)
    old = store(policy, names(prompt(5, 6)), 3.0)
    policy.retain(longer, word(HintKind.ENDED), 4.0)
    assert policy.victims(5, NOTHING) == longer[:3:-1].tolist()
    assert policy.victims(3, NOTHING) == second[:3:-1].tolist(), "then the oldest, as usual"
    assert policy.asked(names(system), 5.0) == 4
    assert policy.asked(old, 6.0) == 6
    policy.check_invariants()


def test_an_ended_session_that_goes_on_is_as_others(make: Make) -> None:
    policy = make(60)
    first, second = some(policy, 2)
    policy.retain(second, word(HintKind.ENDED), 2.0)
    policy.asked(second, 3.0)
    assert policy.victims(1, NOTHING) == first[-1:].tolist()
    policy.check_invariants()


def test_what_a_request_waits_for_leaves_last_until_its_turn(make: Make) -> None:
    policy = make(40)
    paths = some(policy)
    policy.retain(paths[0], word(HintKind.WAITS), 3.0)
    policy.retain(paths[0], word(HintKind.WAITS), 3.0)
    policy.retain(paths[1], keep(100, 1000.0), 3.0)
    policy.retain(paths[0], word(HintKind.TURN), 3.0)  # of the one
    policy.asked(paths[0], 3.0)
    assert policy.victims(12, NOTHING) == [*paths[2][::-1].tolist(), *paths[1][::-1].tolist()]
    policy.retain(paths[0], word(HintKind.TURN), 4.0)
    other = store(policy, names(prompt(9, 6)), 5.0)
    assert policy.victims(6, NOTHING) == paths[0][::-1].tolist()
    assert policy.victims(6, NOTHING) == other[::-1].tolist()
    policy.check_invariants()


def test_where_all_are_waited_for_some_leave_all_the_same(make: Make) -> None:
    policy = make(18)
    for path in some(policy):
        policy.retain(path, word(HintKind.WAITS), 3.0)
    assert len(policy.victims(18, NOTHING)) == 18
    policy.check_invariants()


def test_what_is_lower_is_not_let_in_where_only_what_is_higher_could_leave(make: Make) -> None:
    policy = make(12)
    first, second = some(policy, 2)
    policy.retain(first, keep(50, 100.0), 2.0)
    policy.retain(second, keep(40, 100.0), 2.0)
    new = names(prompt(9, 4))
    policy.asked(new, 3.0)
    policy.retain(new, keep(30, 100.0), 3.0)
    assert policy.admits(new, NOTHING) == 0
    policy.retain(new, keep(45, 100.0), 3.0)
    assert policy.admits(new, NOTHING) == 4
    assert policy.victims(4, NOTHING) == second[:1:-1].tolist()
    policy.entered(new)
    policy.asked(new, 100.0)
    later = names(prompt(10, 4))
    policy.asked(later, 101.0)
    assert policy.admits(later, NOTHING) == 4, "every word ends"
    policy.check_invariants()


@pytest.mark.parametrize("kind", [HintKind.KEEP, HintKind.BACK])
def test_a_client_raises_no_more_than_its_share(make: Make, kind: HintKind) -> None:
    """A client that marks all its prompts for a day does not evict the other client's prompts."""
    policy = make(400)
    tier = Tier(policy, 400, check=True)
    usual = [prompt(at, 20) for at in range(10)]
    num_found = num_asked = 0
    for step in range(600):
        now = float(step)
        if step >= 100:
            flood = prompt(1000 + step, 20)
            tier.request(flood, now)
            policy.retain(names(flood), BlockHint(kind, 100, 0, END, now + MAX_TTL_S), now)
        found = tier.request(usual[step % 10], now)
        if step >= 200:
            num_found, num_asked = num_found + found, num_asked + 20
    policy.check_invariants()
    assert num_found / num_asked > 0.95


def test_a_client_whose_words_are_over_may_raise_others(make: Make) -> None:
    policy = make(24)
    paths = some(policy)
    policy.retain(paths[0], keep(90, 50.0), 5.0)
    policy.retain(paths[1], keep(90, 200.0), 6.0)
    policy.retain(paths[0], keep(80, 50.0), 6.0)  # a raised prompt may be raised again
    left = policy.victims(12, NOTHING)
    assert left == [*paths[1][::-1].tolist(), *paths[2][::-1].tolist()], "no room for more"
    policy.asked(names(prompt(9, 1)), 60.0)
    path = store(policy, names(prompt(8, 8)), 61.0)
    policy.retain(path, keep(90, 200.0), 62.0)
    assert policy.victims(8, NOTHING) == [*paths[0][::-1].tolist(), *path[:5:-1].tolist()]
    policy.check_invariants()


def test_bad_words_are_told(make: Make) -> None:
    policy = make(12)
    (path,) = some(policy, 1)
    wrong: list[tuple[Any, str]] = [
        (BlockHint(5, 0, 0, 1, 1.0), "word 5 is not in 0 .. 4"),
        (BlockHint(-1, 0, 0, 1, 1.0), "word -1 is not in 0 .. 4"),
        (keep(101, 1.0), "level 101 is not in 0 .. 100"),
        (keep(50, 1.0, 2, 1), "2 .. 1 are no places of a prompt"),
        (keep(50, 1.0, 0, 1 << 32), "are no places of a prompt"),
        (keep(50, float("inf")), "finite number of seconds"),
    ]
    for said, text in wrong:
        with pytest.raises(ValueError, match=text):
            policy.retain(path, said, 1.0)
    policy.check_invariants()


# -- hints without effect --------------------------------------------------------------------------


@pytest.mark.parametrize("traffic", ["scan_flood", "tenants"])
def test_words_that_hold_for_nothing_change_no_choice(traffic: str) -> None:
    """Hints on unknown prompts, and hints that have expired, change nothing."""
    module = pytest.importorskip("kvtier._native", reason="the core is not built")
    silent, told = (Tier(module.LivePolicy(CAPACITY), CAPACITY) for _ in range(2))
    unknown = names(prompt(1 << 20, 30))
    requests = TRAFFIC[traffic](np.random.default_rng(1))
    for number, (now, keys) in enumerate(requests):
        if number == 3000:
            break
        if number % 3 == 0:
            told.policy.retain(unknown, keep(90, now + 100), now)
            told.policy.retain(names(keys), keep(5, now - 1), now)
            told.policy.retain(names(keys), word(HintKind.TURN), now)
        assert told.request(keys, now) == silent.request(keys, now)
        assert told.blocks == silent.blocks
    assert told.num_stored == silent.num_stored > CAPACITY


def test_where_nothing_is_said_there_is_no_memory_for_it(make: Make) -> None:
    policy = make(40)
    paths = some(policy)
    before = policy.num_bytes()
    for path in paths:
        policy.retain(path, word(HintKind.TURN), 3.0)
    assert policy.num_bytes() == before


# -- random hints ----------------------------------------------------------------------------------

saids = st.builds(
    lambda kind, level, first, length, lasts: (kind, level, first, first + length, lasts),
    st.sampled_from([HintKind.KEEP, *OF_POLICIES]),
    st.sampled_from([0, 10, 50, 90, 100]),
    st.sampled_from([0, 0, 1, 3, 7]),
    st.sampled_from([1, 2, 5, 20, 20]),
    st.sampled_from([0.0, 1.0, 20.0, MAX_TTL_S]),
)
steps = st.lists(
    st.tuples(
        st.integers(0, 13),  # the kind of step
        st.integers(0, 4),  # a prompt
        st.integers(0, 5),  # number of leading blocks shared with prompt 0
        st.integers(0, 12),  # number of further blocks
        st.integers(0, 8),  # a number of blocks
        st.sampled_from([0.0, 0.1, 1.0, 7.0, 300.0]),
        saids,
    ),
    max_size=120,
)
Step = tuple[int, int, int, int, int, float, tuple[HintKind, int, int, int, float]]


@given(steps=steps, capacity=st.integers(1, 40), seed=st.integers(0, 2**64 - 1))
def test_no_call_upsets_it(make: Make, steps: list[Step], capacity: int, seed: int) -> None:
    tier = Tier(make(capacity, seed), capacity, check=True)
    now = 0.0
    for what, number, shared, length, num, passes, (kind, level, first, end, lasts) in steps:
        now += passes
        path = names(np.concatenate([prompt(0, shared), prompt(number, length)]))
        absent = np.array([name for name in path.tolist() if name not in tier.blocks], np.uint64)
        if what < 3:
            tier.policy.asked(path, now)
            tier.store(absent, path)
        elif what == 3:
            tier.policy.asked(path, now)
        elif what == 4:  # some of the absent blocks, perhaps not the first
            tier.store(absent[num // 2 : num], path)
        elif what < 10:
            tier.policy.retain(path, BlockHint(kind, level, first, end, now + lasts), now)
            tier.check()
        elif what == 10:
            tier.lose(num, path[:shared])
        elif what == 11:
            gone = path[num : num + 2]
            tier.policy.left(gone)
            tier.blocks.difference_update(gone.tolist())
            tier.check()
        elif what == 12:  # requested blocks, in any order
            for name in absent[::-1][: tier.num_free].tolist():
                tier.policy.entered(np.array([name], np.uint64))
                tier.blocks.add(name)
                tier.check()
        else:  # the blocks of the path, those in the tier included
            free = [*path.tolist()]
            while sum(name not in tier.blocks for name in free) > tier.num_free:
                free.pop()
            tier.policy.entered(np.array(free, np.uint64))
            tier.blocks.update(free)
            tier.check()
    tier.policy.asked(names(prompt(99, 1)), now + MAX_TTL_S)
    assert len(tier.lose(capacity, NOTHING)) > 0 or not tier.blocks


def test_it_learns_where_much_is_said(make: Make) -> None:
    """The test is long enough for learning, for sampling among runs and for the expiry queue."""
    chance = np.random.default_rng(11)
    tier = Tier(make(400, 5), 400, check=True)
    for at in range(500):
        now = at * 2.0
        number = int(chance.zipf(1.3)) % 200
        keys = np.concatenate([prompt(0, 4), prompt(number, int(chance.integers(1, 30)))])
        tier.request(keys, now)
        kind = HintKind(int(chance.integers(5)))
        level, lasts = int(chance.integers(101)), float(chance.integers(1, 200))
        tier.policy.retain(names(keys), BlockHint(kind, level, 0, END, now + lasts), now)
    tier.policy.check_invariants()
