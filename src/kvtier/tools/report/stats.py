"""The few statistics that the experiments report, and what may be said by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEAST_VALUES = 6
"""Fewer have no interval of 95 %: the range of five encloses the median 94 times in a hundred."""
NUM_RESAMPLES = 4000
P99_VALUES = 100
"""Fewer values have no p99: see ``percentile``."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, percentiles and the largest, in the unit of the values.

    A percentile is None where there are too few values for it.
    """

    mean: float
    p50: float
    p90: float | None
    p99: float | None
    max: float

    def as_json(self) -> dict[str, float | None]:
        """The fields, rounded to what can be meant."""
        fields = ("mean", "p50", "p90", "p99", "max")
        return {name: rounded(getattr(self, name), 3) for name in fields}


def summarize(values: Sequence[float]) -> Summary | None:
    """Mean, p50, p90 and p99 (linear between ranks), and maximum; None for no values."""
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
    """Return a percentile, linear between ranks; None where no value can lie beyond it.

    Of fewer than 100 values, p99 would be the largest by another name.
    """
    if len(values) * (100 - percent) < 100:
        return None
    return float(np.percentile(np.asarray(values, np.float64), percent))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, and where the true one lies with 95 % confidence.

    Anywhere, ``-inf`` to ``inf``, where too little was measured to say so.
    """

    value: float
    low: float = -math.inf
    high: float = math.inf

    @property
    def is_bounded(self) -> bool:
        """Whether enough was measured to say anything."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def contains(self, value: float) -> bool:
        """Whether the true figure may be ``value``."""
        return self.low <= value <= self.high

    def changed(self, change: Callable[[float], float]) -> Estimate:
        """Return how a figure changes with this one: it grows, or falls."""
        low, high = change(self.low), change(self.high)
        return Estimate(change(self.value), min(low, high), max(low, high))

    def interval_json(self, digits: int = 4) -> list[float | None]:
        """Low and high; None for no bound."""
        return [rounded(each, digits) for each in (self.low, self.high)]


def exactly(value: float) -> Estimate:
    """A figure that was counted, and is not a sample of anything."""
    return Estimate(value, value, value)


def median_with_interval(values: Sequence[float]) -> Estimate:
    """Median and its interval from order statistics: no assumption about the distribution.

    The k-th smallest and k-th largest of n values enclose the median unless fewer than k of them
    lie on one side, which has probability 2 * P(Binomial(n, 1/2) < k). Takes the largest k for
    which that is at most 5 %; there is none for fewer than ``LEAST_VALUES``.
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
    """A figure of samples that were taken together, and its interval by the bootstrap.

    samples: [num, fields], what belongs together in one row (a prompt with and without the cache).
    figure: of [..., num, fields] to [...]. least: samples below which nothing can be said.
    The interval is between percentiles of the figures of ``NUM_RESAMPLES`` draws of as many rows,
    with replacement: those of 95 %, and further out for few rows, which vary less in a draw than
    they do in truth. The draws are the same at every call.
    Source: Hesterberg, What Teachers Should Know About the Bootstrap (2015), section 5.3.
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
    """97.5 % quantile of Student's distribution, to 0.1 % from five degrees of freedom on.

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
    """1 - mean of the first of each pair / mean of the second."""

    def saved(rows: Floats) -> Floats:
        ours, others = np.moveaxis(rows.mean(axis=-2), -1, 0)
        return np.asarray(1 - ours / others)

    return estimate(pairs, saved)


def percentile_ratio(pairs: Sequence[tuple[float, float]], percentile: int, least: int) -> Estimate:
    """Return the ratio of percentiles of the first and the second of each pair.

    least: pairs below which there is no ratio.
    """

    def figure(rows: Floats) -> Floats:
        ours, others = np.moveaxis(np.percentile(rows, percentile, axis=-2), -1, 0)
        return np.asarray(ours / others)

    return estimate(pairs, figure, least)


def summary_json(summary: Summary | None) -> dict[str, float | None] | None:
    """None for no values."""
    return None if summary is None else summary.as_json()


def value_json(found: Estimate | None) -> float | None:
    """Without its interval; None for no figure."""
    return None if found is None else rounded(found.value)


def rounded(value: float | None, digits: int = 4) -> float | None:
    """For JSON, which knows neither more digits nor infinity."""
    return None if value is None or not math.isfinite(value) else round(value, digits)
