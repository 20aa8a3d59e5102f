"""Percentiles and medians."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tools.report.stats import (
    LEAST_VALUES,
    Estimate,
    Floats,
    estimate,
    exactly,
    median_with_interval,
    percentile_ratio,
    summarize,
)
from kvtier.tools.report.target import is_met

pytestmark = pytest.mark.engine

TIMES = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=200)


def test_summary_of_known_values() -> None:
    summary = summarize([float(value) for value in range(1, 102)])
    assert summary is not None
    assert (summary.mean, summary.p50, summary.p90, summary.p99) == (51.0, 51.0, 91.0, 100.0)
    assert summary.as_json() == {
        "mean": 51.0, "p50": 51.0, "p90": 91.0, "p99": 100.0, "max": 101.0
    }  # fmt: skip


def test_nothing_has_no_summary() -> None:
    assert summarize([]) is None
    with pytest.raises(ValueError, match="at least one value"):
        median_with_interval([])


@given(TIMES)
def test_percentiles_are_ordered_and_inside(values: list[float]) -> None:
    summary = summarize(values)
    assert summary is not None
    slack = 1e-9 * max(values)
    percentiles = [each for each in (summary.p90, summary.p99, summary.max) if each is not None]
    assert [summary.p50, *percentiles] == sorted([summary.p50, *percentiles])
    assert min(values) - slack <= summary.p50 <= summary.max == max(values)
    assert min(values) - slack <= summary.mean <= max(values) + slack


@given(TIMES)
def test_interval_encloses_the_median(values: list[float]) -> None:
    median = median_with_interval(values)
    assert median.low <= median.value <= median.high
    assert median.is_bounded == (len(values) >= LEAST_VALUES)
    assert not median.is_bounded or {median.low, median.high} <= set(values)


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (15, 4), (24, 7)])
def test_interval_is_the_tightest_of_95_per_cent(count: int, rank: int) -> None:
    """The ranks equal those in the tables of the sign test."""
    median = median_with_interval([float(value) for value in range(1, count + 1)])
    assert (median.low, median.high) == (rank, count + 1 - rank)
    outside = 2 * sum(math.comb(count, below) for below in range(rank)) / 2**count
    assert outside <= 0.05


@pytest.mark.parametrize("count", range(1, LEAST_VALUES))
def test_few_values_have_no_interval(count: int) -> None:
    """The range of five misses the median once in sixteen times."""
    values = [float(value) for value in range(count)]
    assert median_with_interval(values).interval_json() == [None, None]
    assert estimate([(value,) for value in values], first_mean).interval_json() == [None, None]
    assert 2 / 2 ** (LEAST_VALUES - 1) > 0.05 > 2 / 2**LEAST_VALUES


def first_mean(rows: Floats) -> Floats:
    return np.asarray(rows.mean(axis=-2)[..., 0])


@pytest.mark.parametrize("count", [LEAST_VALUES, 12, 100])
def test_bootstrap_holds_the_mean_as_often_as_it_says(count: int) -> None:
    """On a known, slightly skewed distribution the interval covers the mean in 95 % of cases."""
    samples = np.random.default_rng(2).lognormal(sigma=0.3, size=(400, count, 1))
    found = [estimate(sample.tolist(), first_mean) for sample in samples]
    held = sum(each.contains(math.exp(0.3**2 / 2)) for each in found) / len(found)
    assert 0.91 <= held <= 0.98
    again = estimate(samples[0].tolist(), first_mean)
    assert again == found[0], "the same figures give the same interval"


def test_pairs_are_drawn_together() -> None:
    """A disturbance of both sides of a pair does not change their ratio."""
    rng = np.random.default_rng(3)
    slow = rng.lognormal(sigma=1.0, size=40)
    found = percentile_ratio([(1.1 * each, each) for each in slow.tolist()], 50, LEAST_VALUES)
    assert (found.low, found.value, found.high) == pytest.approx((1.1, 1.1, 1.1))


@pytest.mark.parametrize(
    ("found", "at_most", "at_least"),
    [
        (Estimate(1.0, 0.9, 1.1), None, None),
        (Estimate(0.8, 0.7, 1.0), True, None),
        (Estimate(1.2, 1.0, 1.3), None, True),
        (Estimate(1.2, 1.1, 1.3), False, True),
        (Estimate(0.8, 0.7, 0.9), True, False),
        (Estimate(0.1), None, None),
        (exactly(1.0), True, True),
        (exactly(1.00001), True, True),  # the same, as it is printed
    ],
)
def test_interval_decides_about_a_target(
    found: Estimate, at_most: bool | None, at_least: bool | None
) -> None:
    assert is_met(found, 1.0, at_least=False) is at_most
    assert is_met(found, 1.0, at_least=True) is at_least
