"""PromQL over known series. An unknown name, kind or label fails an assertion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.connectors.vllm.counts import PREFIX
from kvtier.tools.dashboard.series import SERIES

_BEYOND = 5
"""Observations that must lie beyond a quantile for it to be shown."""


def few(quantile: float) -> int:
    """Return the least number of observations for which ``quantile`` is shown."""
    return math.ceil(_BEYOND / (1 - quantile))


@dataclass(frozen=True, slots=True)
class QueryScope:
    """Writer of queries over some instances and a time window.

    Attributes:
        selection: matchers that every series gets.
        window: window of rates.
        kept: labels that every sum keeps.
    """

    selection: str = ""
    window: str = "5m"
    kept: tuple[str, ...] = ()

    def rate(self, name: str, *by: str, where: str = "") -> str:
        """Return the rate of a counter, per second."""
        return self._sum(by, self._over("rate", self._select(name, "counter", by, where)))

    def increase(self, name: str, *by: str, where: str = "") -> str:
        """Return the increase of a counter in the window."""
        return self._sum(by, self._over("increase", self._select(name, "counter", by, where)))

    def grown(self, name: str, *by: str) -> str:
        """Return the growth of a counter, including counters that are new in the window.

        A counter with labels does not exist before its first increment, and ``increase`` does not
        see growth in a first value.
        """
        (series,) = self._select(name, "counter", by)
        begun = f"({series} unless {series} offset {self.window})"
        return self._sum(by, f"(increase({series}[{self.window}]) > 0 or {begun} > 0)")

    def level(self, name: str, *by: str) -> str:
        """Return the level of a gauge, summed over all instances."""
        return self._sum(by, " or ".join(self._select(name, "gauge", by)))

    def highest(self, name: str, *by: str) -> str:
        """Return the highest value of a gauge over all instances."""
        return f"max{self._by(by)} ({' or '.join(self._select(name, 'gauge', by))})"

    def count(self, name: str, *by: str) -> str:
        """Return the number of observations of a histogram in the window."""
        series = self._select(name, "histogram", by, part="_count")
        return self._sum(by, self._over("increase", series))

    def mean(self, name: str, *by: str) -> str:
        """Return the mean of a histogram's observations; nothing if there are none."""
        total, number = (
            self._sum(by, self._over("rate", self._select(name, "histogram", by, part=part)))
            for part in ("_sum", "_count")
        )
        return f"{total} / ({number} > 0)"

    def quantile(self, quantile: float, name: str, *by: str) -> str:
        """Return a quantile of a histogram's observations; nothing if they are too few."""
        series = self._select(name, "histogram", by, part="_bucket")
        buckets = self._sum(("le", *by), self._over("rate", series))
        enough = f"{self.count(name, *by)} >= {few(quantile)}"
        return f"histogram_quantile({quantile}, {buckets}) and {enough}"

    def _sum(self, by: tuple[str, ...], what: str) -> str:
        return f"sum{self._by(by)} ({what})"

    def _by(self, by: tuple[str, ...]) -> str:
        labels = (*self.kept, *by)
        return f" by ({', '.join(labels)})" if labels else ""

    def _over(self, function: str, series: Sequence[str]) -> str:
        """Apply a function over the window, to the first of the series that an instance has."""
        return " or ".join(f"{function}({each}[{self.window}])" for each in series)

    def _select(
        self, name: str, kind: str, by: tuple[str, ...], where: str = "", part: str = ""
    ) -> list[str]:
        """Return the series, and its equivalent under vLLM, which has a prefix."""
        series = SERIES[name]
        assert series.kind == kind, f"{name} is a {series.kind}, and asked for as a {kind}"
        asked = {*by, *([where.partition("=")[0].rstrip("!")] if where else [])}
        assert asked <= {*series.labels}, f"{name} has {series.labels}, and not all of {asked}"
        matchers = ",".join(each for each in (self.selection, where) if each)
        braces = f"{{{matchers}}}" if matchers else ""
        return [f"{at}{part}{braces}" for at in (name, f"{PREFIX}{name}") if at in SERIES]


def share(part: str, whole: str, over: tuple[str, ...] = ()) -> str:
    """Return a query for ``part`` as a share of ``whole``, which has only the labels ``over``.

    It has no value if ``whole`` is 0.
    """
    return f"{part} / on ({', '.join(over)}) group_left () ({whole} > 0)"
