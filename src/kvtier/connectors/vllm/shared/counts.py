"""Counts for kvtier's metrics beside vLLM's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.cache.block_cache import TierUsage
from kvtier.observe import Metrics, MetricSpec, specs

METRICS = tuple(spec for spec in specs.UNDER_VLLM if spec is not specs.VLLM_UNCLAIMED_CHUNKS)
"""Metrics of every connector."""
_COUNTED = {
    core: spec
    for spec in METRICS
    # The connectors count loaded blocks themselves.
    if (core := spec.counted_as) and spec.kind == "counter" and spec is not specs.VLLM_LOADED_CHUNKS
}
"""Counters under vLLM, by the core's counter or histogram of the same number."""

Labels = tuple[str, ...]


class Counts:
    """Counts by metric and labels since they were last taken."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[MetricSpec, Labels], float] = {}

    def add(self, metric: MetricSpec, number: float, *labels: str) -> None:
        """Count; nothing for 0."""
        assert metric.kind == "counter", f"{metric.name} is not counted, it is looked up"
        assert len(labels) == len(metric.labels), f"{metric.name} is counted by {metric.labels}"
        if number:
            at = (metric, labels)
            self._numbers[at] = self._numbers.get(at, 0) + number

    def add_all(self, recent: Mapping[tuple[MetricSpec, Labels], float]) -> None:
        """Add the counts of the core."""
        for (core, labels), number in recent.items():
            if core in _COUNTED:
                self.add(_COUNTED[core], number, *labels)

    def take(self) -> dict[tuple[MetricSpec, Labels], float]:
        """Return the counts since the last call."""
        numbers, self._numbers = self._numbers, {}
        return numbers


@dataclass(frozen=True, slots=True)
class MetricValues:
    """Values of metrics, by metric and labels.

    counters: increases. observations: new values of histograms. gauges: levels.
    """

    counters: Mapping[tuple[MetricSpec, Labels], float]
    observations: Mapping[tuple[MetricSpec, Labels], Sequence[float]]
    gauges: Mapping[tuple[MetricSpec, Labels], float]


def take_values(
    counts: Counts, metrics: Metrics, usage: Mapping[str, TierUsage]
) -> MetricValues | None:
    """Return the metric values since the last call; None if there are none.

    metrics: metrics of the core. usage: slots by tier.
    """
    counts.add_all(metrics.take_recent())
    counted, levels = counts.take(), metrics.take_levels()
    if not counted and not levels:
        return None
    shared = specs.SHARED_WITH_VLLM
    gauges = {(shared[core], at): level for (core, at), level in levels.items() if core in shared}
    for tier, slots in usage.items():
        gauges[specs.VLLM_USED_CHUNKS, (tier,)] = slots.num_used
        gauges[specs.VLLM_CHUNKS, (tier,)] = slots.num_open
    observed = {
        (shared[core], at): seen for (core, at), seen in metrics.take_observations().items()
    }
    return MetricValues(counted, observed, gauges)
