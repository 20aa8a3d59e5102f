"""The few statistics that the experiments report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean and percentiles, in the unit of the values."""

    mean: float
    p50: float
    p90: float
    p99: float

    def as_json(self) -> dict[str, float]:
        """The fields, rounded to what can be meant."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def summarize(values: Sequence[float]) -> Summary | None:
    """Mean, p50, p90 and p99 (linear between ranks); None for no values."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(np.asarray(values, np.float64), [50, 90, 99]).tolist()
    return Summary(float(np.mean(values)), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Median:
    """A median, and where the true one lies with 95 % confidence."""

    value: float
    low: float
    high: float


def median_with_interval(values: Sequence[float]) -> Median:
    """Median and its interval from order statistics: no assumption about the distribution.

    The k-th smallest and k-th largest of n values enclose the median unless fewer than k of them
    lie on one side, which has probability 2 * P(Binomial(n, 1/2) < k). Takes the largest k for
    which that is at most 5 %; with fewer than six values, the whole range.
    """
    if not values:
        raise ValueError("a median needs at least one value")
    ordered = sorted(values)
    count = len(ordered)
    tail, rank = 0.0, 0
    while rank < count // 2:
        tail += math.comb(count, rank) / 2**count
        if 2 * tail > 0.05:
            break
        rank += 1
    inside = max(rank - 1, 0)
    return Median(float(np.median(ordered)), ordered[inside], ordered[count - 1 - inside])
