"""Statistics for vLLM, under its own names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvtier.connectors.vllm.counts import ROOM, SHARED, USED, Counts
from kvtier.telemetry import Metrics, MetricSpec

KINDS = {"gauge": OffloadingGaugeMetadata, "counter": OffloadingCounterMetadata}


def definitions(specs: Iterable[MetricSpec]) -> dict[str, OffloadingMetricMetadata]:
    """Return the definitions of all metrics by name, which vLLM wants before the first value."""
    made: dict[str, OffloadingMetricMetadata] = {}
    for each in specs:
        if each.kind == "histogram":
            made[each.name] = OffloadingHistogramMetadata(
                documentation=each.meaning, labelnames=each.labels, buckets=each.buckets
            )
        else:
            made[each.name] = KINDS[each.kind](documentation=each.meaning, labelnames=each.labels)
    return made


def take_stats(
    counts: Counts, metrics: Metrics, used: Mapping[str, int], room: Mapping[str, int]
) -> OffloadingConnectorStats | None:
    """Return what is new since the last call; None for nothing.

    metrics: the core's. used, room: slots by tier.
    """
    counts.add_all(metrics.take_recent())
    numbers, levels = counts.take(), metrics.take_levels()
    if not numbers and not levels:
        return None
    stats = OffloadingConnectorStats()
    for (metric, labels), number in numbers.items():
        stats.increase_counter(metric.name, number, labels)
    for (name, labels), values in metrics.take_observations().items():
        for value in values:
            stats.observe_histogram(SHARED[name].name, value, labels)
    for (name, labels), level in levels.items():
        if name in SHARED:
            stats.set_gauge(SHARED[name].name, level, labels)
    for gauge, slots in (USED, used), (ROOM, room):
        for tier, num in slots.items():
            stats.set_gauge(gauge.name, num, (tier,))
    return stats
