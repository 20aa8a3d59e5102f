"""Statistics for vLLM's OffloadingConnector, under its own names."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvtier.connectors.vllm.shared.counts import MetricValues
from kvtier.observe import MetricSpec

KINDS = {"gauge": OffloadingGaugeMetadata, "counter": OffloadingCounterMetadata}


def definitions(specs: Iterable[MetricSpec]) -> dict[str, OffloadingMetricMetadata]:
    """Return the definitions of all metrics by name, which vLLM wants before the first value."""
    made: dict[str, OffloadingMetricMetadata] = {}
    for spec in specs:
        name = spec.registered_name
        if spec.kind == "histogram":
            made[name] = OffloadingHistogramMetadata(
                documentation=spec.meaning, labelnames=spec.labels, buckets=spec.buckets
            )
        else:
            made[name] = KINDS[spec.kind](documentation=spec.meaning, labelnames=spec.labels)
    return made


def stats_of(numbers: MetricValues) -> OffloadingConnectorStats:
    """Return metrics in vLLM's form."""
    stats = OffloadingConnectorStats()
    for (metric, labels), number in numbers.counters.items():
        stats.increase_counter(metric.registered_name, number, labels)
    for (metric, labels), values in numbers.observations.items():
        for value in values:
            stats.observe_histogram(metric.registered_name, value, labels)
    for (metric, labels), level in numbers.gauges.items():
        stats.set_gauge(metric.registered_name, level, labels)
    return stats
