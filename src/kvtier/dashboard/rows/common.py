"""What rows share: over which instances and which time they ask, and what to say of quantiles."""

from __future__ import annotations

from kvtier.dashboard.panels import Query
from kvtier.dashboard.queries import Asking, few

_CHOSEN = 'job=~"$job",instance=~"$instance"'

NOW = Asking(_CHOSEN, "$__rate_interval")
"""Lines: as it changes."""
LATELY = Asking(_CHOSEN, "$window")
"""What needs a number of observations: shares and quantiles."""
SHOWN = Asking(_CHOSEN, "$__range")
"""Sums over all that is shown."""

TOO_FEW = "too few to tell"
QUANTILES = (
    f"The median of {few(0.5)} and more, p95 of {few(0.95)} and more in the window that is chosen "
    "above; of fewer nothing is shown, since nothing can be said."
)


def quantiles(name: str, *by: str, legend: str) -> tuple[Query, ...]:
    return tuple(
        Query(LATELY.quantile(quantile, name, *by), f"{legend} {word}".strip())
        for quantile, word in ((0.5, "median"), (0.95, "p95"))
    )
