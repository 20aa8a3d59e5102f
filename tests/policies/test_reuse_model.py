"""What a block is worth: by what its class was used before, and by what it leans on."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier._reference.reuse_model import EDGES, NUM_AGES, ReuseModel, _gittins, bucket

OFTEN, SELDOM, NEW = (1, 0, 0, 0, 0), (2, 0, 0, 0, 0), (2, 0, 0, 0, 1)


def learned(uses: dict[tuple[int, ...], list[float]], num: int = 200) -> ReuseModel:
    """A model that has seen each class used at each of these ages, ``num`` times."""
    model = ReuseModel()
    for features, ages in uses.items():
        cls = model.class_of(features)
        for age in ages:
            for _ in range(num):
                model.used(cls, age, 1.0)
    model.learn([])
    return model


def test_every_age_has_a_bucket_that_it_lies_in() -> None:
    for age in (0.0, 0.2, 0.25, 0.3, 1.0, 17.0, 3600.0, 1e5):
        at = bucket(age)
        assert EDGES[at] <= age < EDGES[at + 1]
    assert bucket(1e9) == NUM_AGES - 1


def test_what_is_used_at_a_steady_rate_is_worth_that_rate_at_every_age() -> None:
    """Of an exponential distribution: one use every ten seconds, however old."""
    model = ReuseModel()
    cls = model.class_of(OFTEN)
    for step in range(1, 20_000):
        # Quantiles of the distribution.
        model.used(cls, -10.0 * math.log(1.0 - step / 20_000), 1.0)
    model.learn([])
    for age in (0.0, 1.0, 5.0, 20.0, 30.0):
        assert model.value(cls, age) == pytest.approx(0.1, rel=0.15)


def test_sooner_is_worth_more() -> None:
    model = learned({OFTEN: [5.0], SELDOM: [500.0]})
    often, seldom = model.class_of(OFTEN), model.class_of(SELDOM)
    assert model.value_of_new(often) > 10 * model.value_of_new(seldom)
    # After the age at which all of them are used, one that was not is worth little.
    assert model.value(often, 60.0) < model.value(seldom, 60.0)


def test_value_rises_towards_the_age_of_use() -> None:
    model = learned({SELDOM: [500.0]})
    seldom = model.class_of(SELDOM)
    assert model.value(seldom, 0.0) < model.value(seldom, 200.0) < model.value(seldom, 400.0)


def test_what_was_forgotten_counts_as_not_used() -> None:
    model = ReuseModel()
    kept, lost = model.class_of(OFTEN), model.class_of(SELDOM)
    for _ in range(100):
        model.used(kept, 10.0, 1.0)
        model.used(lost, 10.0, 1.0)
        for _ in range(9):
            model.forgotten(lost, 1000.0, 1.0)
    model.learn([])
    assert model.value_of_new(kept) > 5 * model.value_of_new(lost)


def test_those_that_still_wait_count_as_not_used() -> None:
    values = []
    for num_waiting in (0, 1000):
        model = ReuseModel()
        cls = model.class_of(OFTEN)
        for _ in range(100):
            model.used(cls, 10.0, 1.0)
        model.learn([(cls, 300.0, 1.0)] * num_waiting)
        values.append(model.value_of_new(cls))
    assert values[0] > 5 * values[1]


def test_a_class_without_history_leans_on_the_one_above_it() -> None:
    model = learned({OFTEN: [5.0], SELDOM: [500.0]})
    new = model.class_of(NEW)
    before = model.value_of_new(new)
    model.learn([])
    seldom = model.class_of(SELDOM)
    assert model.value_of_new(new) == pytest.approx(model.value_of_new(seldom), rel=0.3)
    assert before == pytest.approx(model.value_of_new(seldom), rel=0.3)


def test_what_was_seen_long_ago_fades() -> None:
    model = learned({OFTEN: [5.0]})
    cls = model.class_of(OFTEN)
    before = model.value_of_new(cls)
    for _ in range(200):
        for _ in range(20):
            model.forgotten(cls, 600.0, 1.0)
        model.learn([])
    assert model.value_of_new(cls) < before / 5


@given(st.lists(st.floats(1e-9, 10.0), min_size=NUM_AGES, max_size=NUM_AGES))
def test_value_is_that_of_the_best_of_all_horizons(hazards: list[float]) -> None:
    values = _gittins(hazards)
    for first in range(0, NUM_AGES, 5):
        unused, used, spent, best = 1.0, 0.0, 0.0, 0.0
        for at in range(first, NUM_AGES):
            stays = math.exp(-hazards[at] * (EDGES[at + 1] - EDGES[at]))
            used += unused * (1.0 - stays)
            spent += unused * (1.0 - stays) / hazards[at]
            unused *= stays
            best = max(best, used / spent)
        assert values[first] == pytest.approx(best, rel=1e-4)
