"""Percentiles and medians."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bench.stats import median_with_interval, summarize

pytestmark = pytest.mark.engine

TIMES = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=200)


def test_summary_of_known_values() -> None:
    summary = summarize([float(value) for value in range(1, 102)])
    assert summary is not None
    assert (summary.mean, summary.p50, summary.p90, summary.p99) == (51.0, 51.0, 91.0, 100.0)
    assert summary.as_json() == {"mean": 51.0, "p50": 51.0, "p90": 91.0, "p99": 100.0}


def test_nothing_has_no_summary() -> None:
    assert summarize([]) is None
    with pytest.raises(ValueError, match="at least one value"):
        median_with_interval([])


@given(TIMES)
def test_percentiles_are_ordered_and_inside(values: list[float]) -> None:
    summary = summarize(values)
    assert summary is not None
    slack = 1e-9 * max(values)
    assert min(values) - slack <= summary.p50 <= summary.p90 <= summary.p99 <= max(values) + slack
    assert min(values) - slack <= summary.mean <= max(values) + slack


@given(TIMES)
def test_interval_encloses_the_median(values: list[float]) -> None:
    median = median_with_interval(values)
    assert median.low <= median.value <= median.high
    assert {median.low, median.high} <= set(values)


@pytest.mark.parametrize(("count", "rank"), [(1, 1), (5, 1), (6, 1), (9, 2), (15, 4), (24, 7)])
def test_interval_is_the_tightest_of_95_per_cent(count: int, rank: int) -> None:
    """Ranks as in the tables for the sign test."""
    median = median_with_interval([float(value) for value in range(1, count + 1)])
    assert (median.low, median.high) == (rank, count + 1 - rank)
    outside = 2 * sum(math.comb(count, below) for below in range(rank)) / 2**count
    assert outside <= 0.05 or rank == 1
