"""Differences between two readings: growth, rates and shares."""

from __future__ import annotations

from kvtier.observe.live.reading import Reading

LEAST_WINDOW_S = 0.5
"""Least time between two readings that are compared."""


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
