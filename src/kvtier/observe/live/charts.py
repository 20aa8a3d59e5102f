"""Values of the page's charts, and the last hour of them, which the server keeps."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np

from kvtier.observe.live.picture import Picture

EVERY_S = 10.0
"""Time between two values of a series."""
NUM_POINTS = 360
"""Number of values of a series: one hour."""
MAX_SERIES = 64
"""Largest number of series that are kept, of all charts of a server. A series that appears later is
shown only from the moment at which a page is opened."""
MAX_QUIET_S = 60.0
"""Time after the last request at which the lines of request figures end."""

Values = Mapping[str, Mapping[str, float | None]]
"""Values by the name of a chart, and of a series in it; None if unknown."""


def chart_values(picture: Picture) -> Values:
    """Return the values of the charts at the moment of a picture."""
    is_quiet = picture.quiet_s is not None and picture.quiet_s > MAX_QUIET_S
    flows = {f"{flow.src} → {flow.dst}": flow.bytes_per_s for flow in picture.flows}
    asked, node = picture.requests, picture.node
    if node is None:
        saved = picture.saved.seconds_per_s
        return {
            "hits": {share.tier: None if is_quiet else share.recent for share in picture.hits},
            "flows": flows,
            "saved": {"saved": 0.0 if is_quiet and saved is not None else saved},
            "ttft": _times(is_quiet, asked.ttft_s, asked.ttft_p95_s),
        }
    return {
        "found": {each.name: None if is_quiet else each.found for each in node.tenants},
        "flows": flows,
        "lookups": _times(is_quiet, node.lookup_s, node.lookup_p95_s),
        "waiting": {"waiting": sum(engine.waiting for engine in node.engines)},
    }


def _times(is_quiet: bool, mean: float | None, p95: float | None) -> dict[str, float | None]:
    return {"mean": None, "p95": None} if is_quiet else {"mean": mean, "p95": p95}


class ChartHour:
    """Values of all series in the last hour.

    Its memory is allocated once: ``MAX_SERIES`` rows of ``NUM_POINTS`` values of 4 bytes, 92,160
    bytes in all. A new value overwrites the oldest one.
    """

    def __init__(self) -> None:
        self._values = np.full((MAX_SERIES, NUM_POINTS), np.nan, np.float32)
        self._at_s = np.zeros(NUM_POINTS)
        self._num_points = 0
        self._rows: dict[str, dict[str, int]] = {}  # by chart and series, in order of appearance
        self._num_rows = 0

    def add(self, at_s: float, values: Values) -> Values:
        """Store the values of a moment, unless the last ones are younger than ``EVERY_S``.

        Returns them with the series of each chart in the order of their first appearance, which
        gives a series the same colour on every page.
        """
        for chart, series in values.items():
            rows = self._rows.setdefault(chart, {})
            for name in series:
                if name not in rows and self._num_rows < MAX_SERIES:
                    rows[name] = self._num_rows
                    self._num_rows += 1
        last_s = self._at_s[(self._num_points - 1) % NUM_POINTS]
        if not self._num_points or at_s - last_s >= EVERY_S - 0.5:
            column = self._num_points % NUM_POINTS
            self._num_points += 1
            self._at_s[column], self._values[:, column] = at_s, np.nan
            for chart, rows in self._rows.items():
                for name, row in rows.items():
                    value = values.get(chart, {}).get(name)
                    self._values[row, column] = np.nan if value is None else value
        return {
            chart: {
                name: value if value is not None and isfinite(value) else None
                for name, value in {**dict.fromkeys(self._rows[chart]), **series}.items()
            }
            for chart, series in values.items()
        }

    def as_json(self, now_s: float) -> dict[str, Any]:
        """Return the age of each moment, oldest first, and the values of each series, for JSON."""
        end = self._num_points
        columns = [at % NUM_POINTS for at in range(max(0, end - NUM_POINTS), end)]
        return {
            "ages_s": [round(now_s - at_s, 1) for at_s in self._at_s[columns].tolist()],
            "charts": {
                chart: {
                    name: [
                        float(f"{value:.4g}") if isfinite(value) else None
                        for value in self._values[row, columns].tolist()
                    ]
                    for name, row in rows.items()
                }
                for chart, rows in self._rows.items()
            },
        }
