"""Statistics of kvtier's own connector, as vLLM carries them to its metrics and its log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtier.connectors.vllm.shared.counts import METRICS, MetricValues
from kvtier.observe.specs import VLLM_PREFIX, MetricSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SEPARATOR = "\x1f"
"""Between a metric's name and its labels, where both are one key."""


@dataclass
class ConnectorStats(KVConnectorStats):
    """Metric values as plain data, which vLLM sends between processes.

    ``data`` has the parts "counters", "observations" and "gauges", each keyed by name and labels.
    """

    @classmethod
    def of(cls, values: MetricValues) -> ConnectorStats:
        return cls(
            data={
                "counters": {_key(*at): number for at, number in values.counters.items()},
                "observations": {_key(*at): list(seen) for at, seen in values.observations.items()},
                "gauges": {_key(*at): level for at, level in values.gauges.items()},
            }
        )

    def part(self, name: str) -> dict[str, Any]:
        """Return one of the three parts of ``data``; create it if it is missing."""
        found: dict[str, Any] = self.data.setdefault(name, {})
        return found

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        assert isinstance(other, ConnectorStats), f"statistics of another connector: {type(other)}"
        counters, seen = self.part("counters"), self.part("observations")
        for key, number in other.part("counters").items():
            counters[key] = counters.get(key, 0) + number
        for key, values in other.part("observations").items():
            seen[key] = [*seen.get(key, ()), *values]
        self.part("gauges").update(other.part("gauges"))
        return self

    def reduce(self) -> dict[str, int | float]:
        return {
            " ".join(key.removeprefix(VLLM_PREFIX).split(SEPARATOR)): number
            for key, number in self.part("counters").items()
        }


def _key(metric: MetricSpec, labels: tuple[str, ...]) -> str:
    return SEPARATOR.join((metric.registered_name, *labels))


class ConnectorMetrics(KVConnectorPromMetrics):
    """kvtier's metrics in vLLM's registry."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds = {
            "counter": self._counter_cls,
            "gauge": self._gauge_cls,
            "histogram": self._histogram_cls,
        }
        self._metrics: dict[str, Any] = {}
        for each in METRICS:
            more = {"buckets": each.buckets} if each.kind == "histogram" else {}
            self._metrics[each.registered_name] = kinds[each.kind](
                name=each.registered_name,
                documentation=each.meaning,
                labelnames=[*labelnames, *each.labels],
                **more,
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        stats = ConnectorStats(data=transfer_stats_data)
        engine = self.per_engine_labelvalues[engine_idx]

        def metric(key: str) -> Any:
            name, *labels = key.split(SEPARATOR)
            return self._metrics[name].labels(*engine, *labels)

        for key, number in stats.part("counters").items():
            metric(key).inc(number)
        for key, level in stats.part("gauges").items():
            metric(key).set(level)
        for key, values in stats.part("observations").items():
            for value in values:
                metric(key).observe(value)
