"""Parts that rows share: instances, time range, and notes on quantiles."""

from __future__ import annotations

from kvtier.tools.dashboard.panels import Query
from kvtier.tools.dashboard.queries import QueryScope, few

_CHOSEN = 'job=~"$job",instance=~"$instance"'

NOW = QueryScope(_CHOSEN, "$__rate_interval")
"""Lines: as it changes."""
LATELY = QueryScope(_CHOSEN, "$window")
"""What needs a number of observations: shares and quantiles."""
SHOWN = QueryScope(_CHOSEN, "$__range")
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
