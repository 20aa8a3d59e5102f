"""Parts that rows share: instances, time range, and notes on quantiles."""

from __future__ import annotations

from kvtier.tools.dashboard.panels import Query
from kvtier.tools.dashboard.queries import QueryScope, few

_CHOSEN = 'job=~"$job",instance=~"$instance"'

NOW = QueryScope(_CHOSEN, "$__rate_interval")
"""Scope of graphs over time."""
LATELY = QueryScope(_CHOSEN, "$window")
"""Scope of shares and quantiles, which need many observations."""
SHOWN = QueryScope(_CHOSEN, "$__range")
"""Scope of sums over the whole time range."""

TOO_FEW = "too few to tell"
QUANTILES = (
    f"The median is shown from {few(0.5)} observations in the chosen window on, p95 from "
    f"{few(0.95)} on."
)


def quantiles(name: str, *by: str, legend: str) -> tuple[Query, ...]:
    return tuple(
        Query(LATELY.quantile(quantile, name, *by), f"{legend} {word}".strip())
        for quantile, word in ((0.5, "median"), (0.95, "p95"))
    )
