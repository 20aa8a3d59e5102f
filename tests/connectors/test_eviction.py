"""What leaves next: as LRU at first, then by what was used again; bounded, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.connectors.vllm.pieces.eviction import LEARN_EVERY, EvictionOrder
from kvtier.connectors.vllm.pieces.reuse import FIRST_AGES, NUM_AGES, Batch, ReuseModel


def _keys(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


class Cache:
    """The order under a cache that stores whatever is asked for, as an engine does."""

    def __init__(self, capacity: int) -> None:
        self.order = EvictionOrder(capacity)
        self.capacity = capacity
        self.resident: set[bytes] = set()

    def ask(self, *numbers: int) -> int:
        """A request for a prompt of these blocks; its hits."""
        keys = _keys(*numbers)
        hits = 0
        while hits < len(keys) and keys[hits] in self.resident:
            hits += 1
        reused = {key for key in keys if key in self.resident}
        for key in keys:
            if key not in self.resident:
                self.store(key, set(keys))
        self.order.finish([keys], reused)
        return hits

    def store(self, key: bytes, used: set[bytes]) -> None:
        if len(self.resident) == self.capacity:
            leaving = self.order.evict(1, lambda each: each not in used)
            if leaving is None:
                return
            self.resident -= set(leaving)
        self.order.insert(key)
        self.resident.add(key)


def _left(cache: Cache, num: int) -> Sequence[bytes] | None:
    return cache.order.evict(num, lambda _: True)


def test_without_history_the_least_recently_used_leaves_and_a_prefix_last() -> None:
    cache = Cache(6)
    cache.ask(1, 2, 3)
    cache.ask(4, 5)
    cache.ask(6)
    assert _left(cache, 6) == _keys(3, 2, 1, 5, 4, 6)


def test_start_of_a_prompt_that_goes_on_outlives_what_it_left_behind() -> None:
    cache = Cache(5)
    cache.ask(1, 2, 3)
    cache.ask(1, 2, 4)
    cache.ask(5)
    assert _left(cache, 2) == _keys(3, 4)


def test_chains_that_grow_side_by_side_leave_side_by_side() -> None:
    order = EvictionOrder(6)
    full, window = _keys(1, 2, 3), _keys(11, 12, 13)
    for key in (*full, *window):
        order.insert(key)
    order.finish([full, window], set(), _keys(1, 11, 2, 12, 3, 13))
    assert order.evict(4, lambda _: True) == _keys(13, 3, 12, 2)


def test_block_in_use_stays_and_nothing_changes_where_room_can_not_be_had() -> None:
    cache = Cache(4)
    cache.ask(1, 2, 3, 4)
    held = set(_keys(4, 2))
    assert cache.order.evict(3, lambda key: key not in held) is None
    cache.order.check_invariants()
    assert len(cache.order) == 4
    assert cache.order.evict(2, lambda key: key not in held) == _keys(3, 1)


def test_what_a_running_request_uses_is_refreshed() -> None:
    cache = Cache(3)
    cache.ask(1)
    cache.ask(2)
    cache.order.refresh(b"1")
    assert _left(cache, 1) == _keys(2)
    cache.order.refresh(b"9")  # gone, or never there


def test_block_that_was_never_written_leaves_no_trace() -> None:
    cache = Cache(3)
    cache.order.insert(b"1")
    cache.order.remove(b"1")
    cache.order.check_invariants()
    assert _left(cache, 1) is None


def test_prompts_that_nobody_repeats_do_not_drive_out_those_that_are() -> None:
    rng = random.Random(7)
    cache = Cache(20)
    once = iter(range(1000, 100_000))
    for _ in range(6 * LEARN_EVERY):
        if rng.random() < 0.2:
            cache.ask(1, 2, 3, 4, 5)
        cache.ask(*(next(once) for _ in range(6)))
    # A burst of new prompts that would fill the cache twice over.
    cache.ask(1, 2, 3, 4, 5)
    for _ in range(7):
        cache.ask(*(next(once) for _ in range(6)))
    assert cache.ask(1, 2, 3, 4, 5) == 5


def test_other_habits_are_learned_anew() -> None:
    cache = Cache(20)
    once = iter(range(1000, 1_000_000))
    for _ in range(2 * LEARN_EVERY):
        cache.ask(1, 2, 3, 4, 5)
        cache.ask(*(next(once) for _ in range(6)))
    hits = 0
    for number in range(20 * LEARN_EVERY):
        found = cache.ask(11, 12, 13, 14, 15)
        cache.ask(*(next(once) for _ in range(6)))
        hits += found if number >= 10 * LEARN_EVERY else 0
    assert hits == 10 * LEARN_EVERY * 5


def test_emptied_order_is_as_new() -> None:
    cache = Cache(4)
    for number in range(2 * LEARN_EVERY):
        cache.ask(number % 7, 8)
    cache.order.clear()
    assert len(cache.order) == 0
    assert _left(cache, 1) is None
    cache.order.check_invariants()


# -- what is learned -------------------------------------------------------------------------------


def test_blocks_that_are_used_again_soon_are_worth_more_than_those_that_are_not() -> None:
    model = ReuseModel()
    once, often = model.kind(1, 0), model.kind(3, 0)
    for number in range(200):
        model.used_again(Batch(often, number), number + 4)
        model.given_up(Batch(once, number), number + 100)
    model.learn([], 300)
    assert model.value(Batch(often, 300), 302) > 2 * model.value(Batch(once, 300), 302)


def test_value_falls_with_age_and_never_with_uses() -> None:
    model = ReuseModel()
    for number in range(400):
        model.used_again(Batch(number % model.num_kinds, number), number + 1 + number % 90)
        model.given_up(Batch((number * 7) % model.num_kinds, number), number + 200)
    model.learn([Batch(3, 350, 40)], 400)
    for row in model.values:
        assert row == sorted(row, reverse=True)
    for kind in range(model.num_turns, model.num_kinds):
        fewer = model.values[kind - model.num_turns]
        assert all(a >= b for a, b in zip(model.values[kind], fewer, strict=True))


def test_blocks_that_still_wait_count_against_their_kind() -> None:
    values = []
    for waiting in ([], [Batch(0, 0, 1000)]):
        model = ReuseModel()
        for number in range(50):
            model.used_again(Batch(0, number), number + 2)
        model.learn(waiting, 400)
        values.append(model.value(Batch(0, 400), 401))
    assert values[1] < values[0] / 2


def test_every_age_has_its_bucket() -> None:
    model = ReuseModel()
    values = [model.value(Batch(0, 0), age) for age in (*range(100), 10**6, 10**12)]
    assert values == sorted(values, reverse=True)
    assert len(FIRST_AGES) == NUM_AGES


# -- in any order ----------------------------------------------------------------------------------


class Model(RuleBasedStateMachine):
    """Residents are what was put in and did not leave; what is remembered is bounded."""

    numbers = st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True)

    @initialize(capacity=st.integers(1, 12))
    def begin(self, capacity: int) -> None:
        self.cache = Cache(capacity)

    @rule(numbers=numbers)
    def ask(self, numbers: list[int]) -> None:
        self.cache.ask(*numbers)

    @rule(numbers=numbers, times=st.integers(1, 120))
    def ask_often(self, numbers: list[int], times: int) -> None:
        for _ in range(times):
            self.cache.ask(*numbers)

    @rule(number=st.integers(0, 30))
    def store_and_take_back(self, number: int) -> None:
        (key,) = _keys(number)
        if key not in self.cache.resident:
            self.cache.store(key, set())
            if key in self.cache.resident:
                self.cache.order.remove(key)
                self.cache.resident.remove(key)

    @rule(number=st.integers(0, 30))
    def start_and_go_on(self, number: int) -> None:
        (key,) = _keys(number)
        if key not in self.cache.resident:
            self.cache.store(key, set())

    @rule(numbers=numbers)
    def finish_what_is_partly_gone(self, numbers: list[int]) -> None:
        self.cache.order.finish([_keys(*numbers[:3]), _keys(*numbers[3:])], set())

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "cache"):
            assert len(self.cache.order) == len(self.cache.resident) <= self.cache.capacity
            self.cache.order.check_invariants()


TestAnyOrder = Model.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
