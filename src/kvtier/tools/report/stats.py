"""Statistics that the experiments report, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEAST_VALUES = 6
"""Least number of values with a 95 % interval of the median: the range of five values contains it
with 94 % only."""
NUM_RESAMPLES = 4000
P99_VALUES = 100
"""Least number of values with a p99; see ``percentile``."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, percentiles and maximum, in the unit of the values.

    A percentile is None if there are too few values for it.
    """

    mean: float
    p50: float
    p90: float | None
    p99: float | None
    max: float

    def as_json(self) -> dict[str, float | None]:
        """Return the fields, rounded."""
        fields = ("mean", "p50", "p90", "p99", "max")
        return {name: rounded(getattr(self, name), 3) for name in fields}


def summarize(values: Sequence[float]) -> Summary | None:
    """Return mean, p50, p90, p99 (linear between ranks) and maximum; None for no values."""
    if not values:
        return None
    return Summary(
        float(np.mean(values)),
        float(np.median(values)),
        percentile(values, 90),
        percentile(values, 99),
        max(values),
    )


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return a percentile, linear between ranks; None if no value can lie beyond it.

    The p99 of fewer than 100 values would be just the largest one.
    """
    if len(values) * (100 - percent) < 100:
        return None
    return float(np.percentile(np.asarray(values, np.float64), percent))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval, which is ``-inf`` to ``inf`` for too few measurements."""

    value: float
    low: float = -math.inf
    high: float = math.inf

    @property
    def is_bounded(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def contains(self, value: float) -> bool:
        """Whether the true figure may be ``value``."""
        return self.low <= value <= self.high

    def changed(self, change: Callable[[float], float]) -> Estimate:
        """Return the estimate of a monotonic function of this one."""
        low, high = change(self.low), change(self.high)
        return Estimate(change(self.value), min(low, high), max(low, high))

    def interval_json(self, digits: int = 4) -> list[float | None]:
        """Return low and high; None for no bound."""
        return [rounded(each, digits) for each in (self.low, self.high)]


def exactly(value: float) -> Estimate:
    """Return the estimate of a figure that was counted, without uncertainty."""
    return Estimate(value, value, value)


def median_with_interval(values: Sequence[float]) -> Estimate:
    """Return the median and its interval from order statistics, for any distribution.

    The k-th smallest and k-th largest of n values enclose the median unless fewer than k of them
    lie on one side, which has probability 2 * P(Binomial(n, 1/2) < k). The interval has the largest
    k for which that is at most 5 %. There is none for fewer than ``LEAST_VALUES`` values.
    """
    if not values:
        raise ValueError("a median needs at least one value")
    ordered = sorted(values)
    count = len(ordered)
    if count < LEAST_VALUES:
        return Estimate(float(np.median(ordered)))
    tail, rank = 0.0, 0
    while rank < count // 2:
        tail += math.comb(count, rank) / 2**count
        if 2 * tail > 0.05:
            break
        rank += 1
    return Estimate(float(np.median(ordered)), ordered[rank - 1], ordered[count - rank])


def estimate(
    samples: Sequence[Sequence[float]],
    figure: Callable[[Floats], Floats],
    least: int = LEAST_VALUES,
) -> Estimate:
    """Return a figure of paired samples, and its interval by the bootstrap.

    The interval is between percentiles of the figures of ``NUM_RESAMPLES`` resamples of as many
    rows, with replacement. The percentiles are those of 95 %, and further out for few rows, whose
    resamples vary too little. The resamples are the same in every call.
    Source: Hesterberg, What Teachers Should Know About the Bootstrap (2015), section 5.3.

    Args:
        samples: [num, fields], paired values in one row (a prompt with and without the cache).
        figure: maps [..., num, fields] to [...].
        least: least number of samples for an interval.
    """
    rows = np.asarray(samples, np.float64)
    value = float(figure(rows))
    if len(rows) < least:
        return Estimate(value)
    drawn = np.random.default_rng(0).integers(len(rows), size=(NUM_RESAMPLES, len(rows)))
    outside = 100 * NormalDist().cdf(-math.sqrt(len(rows) / (len(rows) - 1)) * _t(len(rows) - 1))
    low, high = np.percentile(figure(rows[drawn]), [outside, 100 - outside]).tolist()
    return Estimate(value, min(low, value), max(high, value))


def _t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, to 0.1 % from five degrees of freedom on.

    Source: Abramowitz, Stegun: Handbook of Mathematical Functions, 26.7.5.
    """
    z = NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def mean_saved(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Return 1 - mean of the first of each pair / mean of the second."""

    def saved(rows: Floats) -> Floats:
        ours, others = np.moveaxis(rows.mean(axis=-2), -1, 0)
        return np.asarray(1 - ours / others)

    return estimate(pairs, saved)


def percentile_ratio(pairs: Sequence[tuple[float, float]], percentile: int, least: int) -> Estimate:
    """Return the ratio of percentiles of the first and the second of each pair.

    least: least number of pairs for an interval.
    """

    def figure(rows: Floats) -> Floats:
        ours, others = np.moveaxis(np.percentile(rows, percentile, axis=-2), -1, 0)
        return np.asarray(ours / others)

    return estimate(pairs, figure, least)


def summary_json(summary: Summary | None) -> dict[str, float | None] | None:
    """Return a summary for JSON; None for no values."""
    return None if summary is None else summary.as_json()


def value_json(found: Estimate | None) -> float | None:
    """Return an estimate's value for JSON; None for no estimate."""
    return None if found is None else rounded(found.value)


def rounded(value: float | None, digits: int = 4) -> float | None:
    """Return a value rounded for JSON; None for an infinite one or NaN."""
    return None if value is None or not math.isfinite(value) else round(value, digits)
