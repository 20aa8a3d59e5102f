"""The cost of a step does not grow with the cache: counted, not timed."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType

import pytest

from benchmarks.scale.keyed import Harness, steps
from benchmarks.scale.part import Row, exponent, ratio_in_turn


def calls(step: Callable[[], object]) -> Counter[str]:
    """Count the calls of each function, native and Python."""
    counted: Counter[str] = Counter()

    def count(frame: FrameType, event: str, called: object) -> None:
        if event == "call":
            counted[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            counted[getattr(called, "__qualname__", str(called))] += 1

    gc.disable()  # it calls whoever wants to know
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counted


SAMPLED = ("Returns._note_return", "OrderedDict.pop", "OrderedDict.popitem")
"""Calls for those blocks of a step that are in a sample, of evicted ones that come again."""
STEP_BLOCKS = 4 * 64


@pytest.fixture(scope="module")
def harnesss() -> tuple[Harness, Harness]:
    return Harness(10_000), Harness(40_000)


@pytest.mark.parametrize("name", list(steps(Harness(10_000))))
def test_a_step_makes_as_many_calls_however_many_blocks_there_are(
    name: str, harnesss: tuple[Harness, Harness]
) -> None:
    few, many = (steps(harness)[name] for harness in harnesss)
    few(), many()  # the first one warms up
    of_few, of_many = calls(few), calls(many)
    for sampled in SAMPLED:  # the more blocks there are, the fewer of a step are in the sample
        assert of_many.pop(sampled, 0) <= max(of_few.pop(sampled, 0), STEP_BLOCKS)
    assert of_few == of_many


def test_what_is_held_is_met_by_one_eviction_only(harnesss: tuple[Harness, Harness]) -> None:
    harness = harnesss[1]
    memory, num_evictable = harness.cache.memory, harness.index.num_evictable(harness.cache.memory)
    held = harness.index.keys(harness.index.order(memory)[:1000])
    harness.cache.hold(held)
    store = steps(harness)["store 64 blocks, 64 others leave"]
    store()
    assert not set(held) & set(harness.index.keys(harness.index.order(memory)))
    harness.cache.release(held)
    assert harness.index.num_evictable(memory) == num_evictable


def test_exponent_is_that_of_the_growth() -> None:
    def row(num: int, *seconds: float) -> Row:
        return Row("look up", "kvtier", "blocks", num, seconds)

    rows = [row(10**n, *[2e-6 * 10 ** (n / 2)] * 6) for n in range(4, 8)]
    found = exponent(rows)
    assert [round(each, 6) for each in (found.value, found.low, found.high)] == [0.5, 0.5, 0.5]
    apart = exponent([row(10, *[1.0] * 6), row(1000, *[0.5] * 3, *[2.0] * 3)])
    assert apart.low < 0 < apart.high
    assert exponent([row(10, 1.0), row(1000, 1.0)]).high > 5, "one call of each says nothing"


def test_a_ratio_in_turn_does_not_see_slow_minutes() -> None:
    slow = [1.0, 3.0, 1.0, 3.0, 1.0, 3.0, 1.0, 3.0]
    one = Row("o", "c", "blocks", 1, slow)
    many = Row("o", "c", "blocks", 64, [2.5 * s for s in slow])
    found = ratio_in_turn(one, many)
    assert found.value == found.low == found.high == 2.5
