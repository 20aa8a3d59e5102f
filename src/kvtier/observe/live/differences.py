"""Differences between two readings: growth, rates, shares, and times of a histogram."""

from __future__ import annotations

from math import inf

from kvtier.observe.live.reading import Reading

LEAST_WINDOW_S = 0.5
"""Least time between two readings that are compared."""
LEAST_TIMES = 5
"""Least number of times for which their mean is shown."""
LEAST_BEYOND = {0.95: 1, 0.99: 5}
"""Least number of times above a quantile for which it is shown."""


def grown(first: Reading, now: Reading, name: str, **labels: str) -> float | None:
    """Return the growth of a metric; None if it is missing, or the readings are too close.

    A metric that is missing in ``first`` only was 0.
    """
    if now.at_s - first.at_s < LEAST_WINDOW_S:
        return None
    value = now.total(name, **labels)
    return None if value is None else max(0.0, value - (first.total(name, **labels) or 0.0))


def rate(first: Reading, now: Reading, name: str, **labels: str) -> float | None:
    growth = grown(first, now, name, **labels)
    return None if growth is None else growth / (now.at_s - first.at_s)


def ratio(part: float | None, whole: float | None, least: float) -> float | None:
    """Return the share ``part`` / ``whole``; None if ``whole`` is below ``least``."""
    if part is None or whole is None or whole < least:
        return None
    return min(1.0, part / whole)


def mean(first: Reading, now: Reading, histogram: str) -> float | None:
    """Return the mean of the times that were added; None if there were too few."""
    num, seconds = (grown(first, now, f"{histogram}_{end}") for end in ("count", "sum"))
    return None if num is None or seconds is None or num < LEAST_TIMES else seconds / num


def quantile(first: Reading, now: Reading, histogram: str, part: float) -> float | None:
    """Return a quantile of the times that were added. part: 0.95 for the 95th percentile.

    As in Prometheus, times are assumed to be evenly spread within a bucket. None if there were too
    few; infinite for the last bucket.
    """
    name, num = f"{histogram}_bucket", grown(first, now, f"{histogram}_count")
    if num is None or num * (1 - part) < LEAST_BEYOND[part] - 1e-6:
        return None
    begin, before = 0.0, 0.0
    for end, le in sorted((float(le), le) for le in now.by(name, "le") if le != "+Inf"):
        below = grown(first, now, name, le=le) or 0.0
        if below >= part * num:
            return begin + (end - begin) * (part * num - before) / (below - before)
        begin, before = end, below
    return inf
