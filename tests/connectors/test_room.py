"""Evictions of a tier that has to take every block."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.connectors.vllm.standalone.capacity import Path, UnadmittedTier
from tests.kit.effort import effort


def prompt(number: int, num_blocks: int) -> list[int]:
    return [(number << 24) + at for at in range(1, num_blocks + 1)]


class Tier:
    """A tier that stores whatever is requested, some blocks at a time, as an engine does."""

    def __init__(self, capacity: int, step: int = 4) -> None:
        self.room, self.capacity, self.step = UnadmittedTier(capacity), capacity, step
        self.resident: set[int] = set()
        self.now_s = 0.0

    def ask(self, names: list[int]) -> int:
        """A request for a prompt of these blocks; its hits."""
        self.now_s += 1.0
        path = self.room.ask([np.array(names, np.uint64)], self.now_s)
        hits = 0
        while hits < len(names) and names[hits] in self.resident:
            hits += 1
        new = [name for name in names if name not in self.resident]
        for first in range(0, len(new), self.step):
            self.store(new[first : first + self.step], path)
        return hits

    def store(
        self, names: list[int], path: Path | None, held: frozenset[int] = frozenset()
    ) -> bool:
        num = len(self.resident) + len(names) - self.capacity
        if num > 0:
            leaving = self.room.make(num, names, path, held)
            assert len(set(leaving)) == len(leaving) <= num
            assert self.resident.issuperset(leaving)
            assert held.isdisjoint(leaving)
            self.resident -= set(leaving)
            if len(leaving) < num:
                return False
        self.room.enter(names)
        self.resident.update(names)
        return True


def test_without_history_the_least_recently_used_leaves_and_a_prefix_last() -> None:
    tier = Tier(6)
    one, two, three = prompt(1, 3), prompt(2, 2), prompt(3, 1)
    for each in (one, two, three):
        tier.ask(each)
    assert tier.room.make(6, prompt(4, 6), None, ()) == [*reversed(one), *reversed(two), *three]


def test_start_of_a_prompt_that_is_used_again_outlives_what_it_left_behind() -> None:
    tier = Tier(5)
    tier.ask(one := prompt(1, 3))
    assert tier.ask([*one[:2], *prompt(2, 1)]) == 2
    tier.ask(prompt(3, 1))
    assert tier.room.make(2, prompt(4, 2), None, ())[0] == one[2]


def test_a_prompt_longer_than_the_tier_does_not_push_out_its_own_beginning() -> None:
    tier = Tier(16)
    tier.ask(prompt(1, 8))
    long = prompt(2, 100)
    tier.ask(long)
    # All but what one step of storing takes is its beginning.
    assert tier.ask(long) >= 16 - 2 * tier.step


def test_what_is_held_stays_and_less_may_leave() -> None:
    tier = Tier(4)
    tier.ask(one := prompt(1, 4))
    assert not tier.store(prompt(2, 3), None, held=frozenset(one[2:]))
    assert tier.store(prompt(2, 1), None, held=frozenset())


def test_prompts_that_nobody_repeats_do_not_drive_out_those_that_are() -> None:
    chance, tier = random.Random(7), Tier(200)
    often = [prompt(number, 20) for number in range(6)]
    found = asked = 0
    for number in range(4000):
        tier.ask(prompt(100 + number, 30))
        if chance.random() < 0.3:
            found += tier.ask(chance.choice(often)) if number > 1000 else 0
            asked += 20 if number > 1000 else 0
    tier.room.check_invariants()
    # LRU has the last six prompts, and one in thirty of the recurring ones.
    assert found > 0.5 * asked


def test_a_guest_that_is_used_again_stays() -> None:
    tier = Tier(200)
    often = [prompt(number, 20) for number in range(6)]
    for number in range(4000):
        tier.ask(prompt(100 + number, 30))
        if number % 4 == 0:
            tier.ask(often[number // 4 % 6])
    tier.ask(new := prompt(99_999, 4))
    unadmitted = set(new) & tier.room._unadmitted.keys()
    assert unadmitted, "what is asked for all the time is worth more"
    assert tier.ask(new) == 4
    assert not tier.room._unadmitted.keys() & set(new)
    tier.room.check_invariants()


def test_block_that_was_never_written_leaves_no_trace() -> None:
    tier = Tier(3)
    path = tier.room.ask([np.array(one := prompt(1, 2), np.uint64)], 1.0)
    tier.store(one, path)
    for name in reversed(one):
        tier.room.leave(name)
    assert len(tier.room) == 0
    tier.room.check_invariants()


class Model(RuleBasedStateMachine):
    """Residents are what was put in and did not leave, in whatever order things happen."""

    numbers = st.tuples(st.integers(0, 6), st.integers(1, 9))

    @initialize(capacity=st.integers(1, 24), step=st.integers(1, 5))
    def begin(self, capacity: int, step: int) -> None:
        self.tier = Tier(capacity, step)

    @rule(one=numbers)
    def ask(self, one: tuple[int, int]) -> None:
        self.tier.ask(prompt(*one))

    @rule(one=numbers, times=st.sampled_from([1, 2, 130]))
    def ask_often(self, one: tuple[int, int], times: int) -> None:
        for at in range(times):
            self.tier.ask(prompt(one[0] + at % 3, one[1]))

    @rule(one=numbers, num_held=st.integers(0, 9))
    def store_what_nobody_asked_for(self, one: tuple[int, int], num_held: int) -> None:
        names = [name for name in prompt(one[0] + 50, one[1]) if name not in self.tier.resident]
        held = frozenset(sorted(self.tier.resident)[:num_held])
        self.tier.store(names[: self.tier.capacity], None, held)

    @rule(at=st.integers(0, 30))
    def lose(self, at: int) -> None:
        """The end of a prompt: what was to be stored last."""
        if self.tier.resident:
            names = sorted(
                name for name in self.tier.resident if name + 1 not in self.tier.resident
            )
            self.tier.room.leave(name := names[at % len(names)])
            self.tier.resident.remove(name)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "tier"):
            assert len(self.tier.room) == len(self.tier.resident) <= self.tier.capacity
            self.tier.room.check_invariants()


TestAnyOrder = Model.TestCase
TestAnyOrder.settings = settings(max_examples=effort(40), stateful_step_count=20, deadline=None)
