"""What a part of the benchmark measures: operations at several sizes, and how they grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log
from statistics import median

from kvtier.serve_bench.stats import Estimate


@dataclass(frozen=True, slots=True)
class Row:
    """One operation at one size. num: blocks, records, tokens or sequences, as ``axis`` says.
    seconds: of the thread's CPU, for one call each. more: what else was seen, by name."""

    operation: str
    contestant: str
    axis: str
    num: int
    seconds: Sequence[float]
    more: dict[str, object] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        return median(self.seconds)

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
    """Rows, and the targets that they decide (``benchmarks.targets.judged``)."""

    rows: Sequence[Row]
    targets: Sequence[dict[str, object]]


def timed(call: Callable[[], object], num_calls: int) -> list[float]:
    """Seconds of this thread's CPU, of each call."""
    seconds = []
    for _ in range(num_calls):
        began = time.thread_time()
        call()
        seconds.append(time.thread_time() - began)
    return seconds


def exponent(rows: Sequence[Row]) -> Estimate:
    """b of seconds = a * num ** b, fitted to the medians of one operation: 0 where it does not
    grow."""
    points = sorted((log(row.num), log(max(row.median_s, 1e-9))) for row in rows)
    assert len(points) >= 2, "one size says nothing about growth"
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return Estimate(slope / sum((x - mean_x) ** 2 for x, _ in points))
