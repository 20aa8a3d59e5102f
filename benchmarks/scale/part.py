"""Base of a part of the benchmark: operations at several sizes, and how they grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log

from kvtier.tools.report.stats import Estimate, median_with_interval

LEAST_S, MAX_S = 1e-9, 1e9
"""Range of times that a clock can resolve. Medians outside of it are clamped."""


@dataclass(frozen=True, slots=True)
class Row:
    """One operation at one size."""

    operation: str
    contestant: str
    axis: str
    num: int
    """Blocks, records, tokens or sequences, as ``axis`` names them."""
    seconds: Sequence[float]
    """CPU seconds of the thread, one value per call."""
    more: dict[str, object] = field(default_factory=dict)
    """Further figures by name."""

    @property
    def estimate(self) -> Estimate:
        """Median with its interval."""
        return median_with_interval(self.seconds)

    @property
    def median_s(self) -> float:
        return self.estimate.value

    def as_json(self) -> dict[str, object]:
        return {
            "operation": self.operation,
            "contestant": self.contestant,
            self.axis: self.num,
            "median_us": round(self.median_s * 1e6, 3),
            "worst_us": round(max(self.seconds) * 1e6, 3),
            "calls": len(self.seconds),
            **self.more,
        }


@dataclass(frozen=True, slots=True)
class Part:
    """Rows, and the targets that they decide (``benchmarks.report.targets.judged``)."""

    rows: Sequence[Row]
    targets: Sequence[dict[str, object]]


def timed(call: Callable[[], object], num_calls: int) -> list[float]:
    """Return this thread's CPU seconds of each call."""
    seconds = []
    for _ in range(num_calls):
        began = time.thread_time()
        call()
        seconds.append(time.thread_time() - began)
    return seconds


def timed_in_turn(
    calls: Mapping[int, Callable[[], object]], num_calls: int
) -> dict[int, list[float]]:
    """Return ``timed`` by size, with all sizes called once in every round.

    Slow and fast minutes of the machine then affect all sizes alike.
    """
    seconds: dict[int, list[float]] = {num: [] for num in calls}
    for _ in range(num_calls):
        for num, call in calls.items():
            seconds[num] += timed(call, 1)
    return seconds


def ratio_in_turn(base: Row, other: Row) -> Estimate:
    """Return the median ratio of ``other`` to ``base``, which were timed in turn."""
    return median_with_interval(
        [s / base_s for base_s, s in zip(base.seconds, other.seconds, strict=True)]
    )


def exponent_in_turn(rows: Sequence[Row]) -> Estimate:
    """Return the median over rounds of ``exponent``, for sizes that were timed in turn."""
    rounds = zip(*(row.seconds for row in rows), strict=True)
    return median_with_interval(
        [
            exponent(
                [replace(row, seconds=(s,)) for row, s in zip(rows, seconds, strict=True)]
            ).value
            for seconds in rounds
        ]
    )


def exponent(rows: Sequence[Row]) -> Estimate:
    """Return b of seconds = a * num ** b, fitted to the medians of one operation.

    It is 0 without growth. Its interval follows from those of the medians.
    """
    assert len(rows) >= 2, "one size says nothing about growth"
    sizes = [log(row.num) for row in rows]
    middle = sum(sizes) / len(sizes)
    spread = sum((size - middle) ** 2 for size in sizes)
    weights = [(size - middle) / spread for size in sizes]
    times = [row.estimate for row in rows]
    return Estimate(
        sum(w * _log(time.value) for w, time in zip(weights, times, strict=True)),
        sum(w * _log(t.low if w > 0 else t.high) for w, t in zip(weights, times, strict=True)),
        sum(w * _log(t.high if w > 0 else t.low) for w, t in zip(weights, times, strict=True)),
    )


def _log(seconds: float) -> float:
    return log(min(max(seconds, LEAST_S), MAX_S))
