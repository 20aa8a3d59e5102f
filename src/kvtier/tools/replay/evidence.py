"""Evidence in a trace: how much it can tell."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.tools.replay.segments import Segments
from kvtier.tools.replay.trace import Floats, Trace
from kvtier.tools.report.stats import Estimate, estimate

LEAST_REUSES = 100
"""Least number of requests that share blocks with an earlier one; fewer may be chance."""
LEAST_TURNS = 2
"""Number of times that a trace must fill a cache for its hit ratio to hold for a longer trace. The
report says "twice"."""
NUM_SLICES = 12
"""Slices of equal time, whose spread of savings gives the interval of the total."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence in a trace.

    Attributes:
        num_reuses: requests that share blocks with an earlier one.
        age_p50_s, age_p90_s: quantiles of the time between two uses of a block; None if no block is
            reused.
        window_s: duration of the trace.
        has_contents: whether the trace says which prompts begin alike.
    """

    num_reuses: int
    age_p50_s: float | None
    age_p90_s: float | None
    window_s: float
    has_contents: bool = True

    @property
    def weakness(self) -> str:
        """Reason why nothing can be recommended; "" if there is none."""
        if not self.has_contents:
            return "it has the lengths of prompts, and not which of them begin alike"
        if self.window_s <= 0:
            return "all its requests come at one time"
        if self.num_reuses < LEAST_REUSES:
            return (
                f"{self.num_reuses} of its requests share a prefix with an earlier one, and fewer "
                f"than {LEAST_REUSES} may be chance"
            )
        return ""


def gather(trace: Trace, segments: Segments) -> Evidence:
    """Gather the evidence of a trace."""
    reuse = segments.is_reuse
    ages = trace.times[segments.request[reuse]] - trace.times[segments.previous[reuse]]
    p50, p90 = _weighted(ages, segments.length[reuse].astype(np.float64), (0.5, 0.9))
    num_reuses = len(np.unique(segments.request[reuse]))
    return Evidence(num_reuses, p50, p90, trace.window_s, trace.has_contents)


def rate_per_hour(trace: Trace, values: Floats) -> Estimate:
    """Return the sum per hour of a value per request, with its interval.

    The interval comes from the differences between slices of the trace. Consecutive slices are
    correlated, so it is rather too narrow.
    """
    slice_s = trace.window_s / NUM_SLICES
    if not slice_s:
        return Estimate(float("nan"))
    numbers = np.minimum((trace.times - trace.times[0]) / slice_s, NUM_SLICES - 1).astype(np.int64)
    sums = np.bincount(numbers, weights=values, minlength=NUM_SLICES) * (3600 / slice_s)
    return estimate(sums[:, None].tolist(), lambda rows: np.mean(rows[..., 0], axis=-1))


def _weighted(
    values: Floats, weights: Floats, shares: tuple[float, ...]
) -> tuple[float | None, ...]:
    """Return quantiles of weighted values; None if there are no values."""
    if not len(values):
        return (None,) * len(shares)
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    places = np.searchsorted(reached, np.array(shares) * reached[-1])
    return tuple(values[order][places].tolist())
