"""Benchmark figures against their targets: met, not met, or undecided for lack of rounds."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.tools.report.stats import Estimate, median_with_interval, rounded
from kvtier.tools.report.target import DIGITS, is_met

Bounds = tuple[float | None, float | None]
"""95 % confidence bounds of a figure; None if there are too few rounds."""


def bounds(values: Sequence[float]) -> Bounds:
    """Return the 95 % bounds of the median."""
    low, high = median_with_interval(values).interval_json(digits=9)
    return low, high


def estimate(value: float, between: Bounds) -> Estimate:
    """Return a row's figure as an estimate."""
    low, high = between
    return Estimate(value) if low is None or high is None else Estimate(value, low, high)


def ratio(one: Estimate, another: Estimate) -> Estimate:
    """Return the ratio of two positive figures not measured in pairs, with the errors of both."""
    if not one.is_bounded or not another.is_bounded:
        return Estimate(one.value / another.value)
    return Estimate(one.value / another.value, one.low / another.high, one.high / another.low)


def judged(
    target_id: str,
    found: Estimate,
    wanted: float,
    *,
    at_least: bool,
    digits: int = 3,
    **more: object,
) -> dict[str, object]:
    """Return the row for the list of targets."""
    return {
        "id": target_id,
        **more,
        "value": rounded(found.value, digits),
        "interval_95": found.interval_json(digits),
        "target": wanted,
        "met": is_met(found, wanted, at_least, max(digits, DIGITS)),
    }
