"""Panels of the dashboard, independent of Grafana's JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from kvtier.tools.dashboard.series import SERIES, Series

_NAME = re.compile(r"\b(?:kvtier_|vllm:|sglang:)\w+")
_PART = re.compile(r"_(bucket|sum|count)$")


class PanelKind(StrEnum):
    """Kind of panel, by Grafana's name."""

    LINES = "timeseries"
    NUMBER = "stat"
    STATES = "state-timeline"


class Unit(StrEnum):
    """Unit of a panel, by Grafana's name."""

    SHARE = "percentunit"
    SECONDS = "s"
    BYTES = "bytes"
    BYTES_PER_S = "Bps"
    PER_S = "cps"
    REQUESTS_PER_S = "reqps"
    NUMBER = "short"
    RATIO = "none"


def names_in(query: str) -> tuple[str, ...]:
    """Return the metrics in a query, without ``_bucket``, ``_sum`` and ``_count``."""
    found = _NAME.findall(query)
    return tuple(dict.fromkeys(name if name in SERIES else _PART.sub("", name) for name in found))


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel.

    text: PromQL. legend: legend of each line, with labels as ``{{tier}}``.
    """

    text: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. Engines that are not running add no line to it.

    Attributes:
        title: title of the panel.
        meaning: what it shows, and what to do.
        unit: unit of the values.
        queries: queries of the panel.
        kind: kind of panel.
        width: columns of Grafana's grid.
        is_stacked: whether lines are stacked.
        without: text if there is no value.
        highest: upper end of the axis; None for automatic.
        bad_from: value from which on it is red; None for never.
        states: value, text and colour of each state.
    """

    title: str
    meaning: str
    unit: Unit
    queries: tuple[Query, ...]
    kind: PanelKind = PanelKind.LINES
    width: int = 8
    is_stacked: bool = False
    without: str = "nothing of the kind"
    highest: float | None = None
    bad_from: float | None = None
    states: tuple[tuple[int, str, str], ...] = ()

    @property
    def series(self) -> tuple[Series, ...]:
        """Series that the panel draws."""
        names = (name for query in self.queries for name in names_in(query.text))
        return tuple(SERIES[name] for name in dict.fromkeys(names))

    @property
    def description(self) -> str:
        """Meaning of the panel, and of each metric in it."""
        each = (f"- `{series.name}`: {series.meaning}" for series in self.series)
        return "\n".join([self.meaning, "", *each])


@dataclass(frozen=True, slots=True)
class PanelRow:
    title: str
    panels: tuple[Panel, ...]
