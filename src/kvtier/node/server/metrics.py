"""Metrics of a node: those of its partitions with their names as labels, and its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from kvtier.core.types import HOST
from kvtier.node.server.control import NodeState
from kvtier.node.server.lookups import TimeCounts
from kvtier.observe import MetricSpec, specs

PartitionRegistries = Mapping[tuple[str, str], CollectorRegistry]
"""By tenant and name of the partition, its registry."""

Values = dict[tuple[str, ...], float]
"""Values of one metric by its labels."""


class NodeMetrics(Collector):
    """All metrics of a node at one moment.

    state: of the node. lookups: times of look-ups. partitions: registries of its partitions.
    """

    def __init__(
        self, state: NodeState, lookups: TimeCounts, partitions: PartitionRegistries
    ) -> None:
        self._state = state
        self._lookups = lookups
        self._partitions = partitions

    def text(self) -> bytes:
        """Return them in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        values = _values(self._state)
        for spec in specs.NODE:
            if spec.kind == "histogram":
                yield _histogram(spec, self._lookups)
                continue
            kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            family = kind(spec.name, spec.meaning, labels=spec.labels)
            for labels, value in values[spec].items():
                family.add_metric(labels, value)
            yield family
        yield from _labelled(self._partitions)


def _histogram(spec: MetricSpec, lookups: TimeCounts) -> Metric:
    ends = [*map(str, spec.buckets), "+Inf"]
    buckets = list(zip(ends, map(float, accumulate(lookups.numbers)), strict=True))
    return HistogramMetricFamily(
        spec.name, spec.meaning, buckets=buckets, sum_value=lookups.total_s
    )


def _labelled(partitions: PartitionRegistries) -> Iterable[Metric]:
    """Return the partitions' metrics, each once, with the labels tenant and room."""
    merged: dict[str, Metric] = {}
    for (tenant, partition), registry in partitions.items():
        for family in registry.collect():
            one = merged.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            one.samples += [
                sample._replace(labels={**sample.labels, "tenant": tenant, "room": partition})
                for sample in family.samples
            ]
    return merged.values()


def _values(state: NodeState) -> dict[MetricSpec, Values]:
    """Return the values of the node's own counters and gauges."""
    return {
        specs.NODE_INFO: {(state.version,): 1},
        specs.NODE_UPTIME_SECONDS: {(): state.uptime_s},
        specs.NODE_MEMORY_BYTES: {(): state.memory_bytes},
        specs.NODE_SEGMENT_BYTES: {(): state.segment_bytes},
        specs.NODE_FREE_BYTES: {(): state.free_segments * state.segment_bytes},
        specs.NODE_UNVERIFIED_BLOCKS: {(): state.unverified_blocks},
        specs.NODE_SLOTS_ASIDE: {(): state.slots_aside},
        **_of_engines(state),
        **_of_partitions(state),
        **_of_tenants(state),
    }


def _of_engines(state: NodeState) -> dict[MetricSpec, Values]:
    engines: Counter[tuple[str, ...]] = Counter(
        {(name,): 0 for name in state.tenants}  # so that the last one that leaves is seen to
    )
    numbers: dict[MetricSpec, Counter[tuple[str, ...]]] = {
        specs.NODE_ENGINE_PROCESSES: Counter(),
        specs.NODE_ENGINE_SLOTS: Counter(),
        specs.NODE_WAITING_REQUESTS: Counter(),
        specs.NODE_ENGINE_FAILURES: Counter(),
        specs.NODE_ENGINE_PAUSES: Counter(),
    }
    for engine in state.engines:
        engines[engine.tenant,] += 1
        told = len(engine.pids), engine.slots, engine.waiting, engine.failures, engine.pauses
        for counts, num in zip(numbers.values(), told, strict=True):
            counts[engine.tenant, engine.name] += num  # two users may use the same name
    titles: Values = {
        (engine.tenant, engine.name, engine.title): 1.0 for engine in state.engines if engine.title
    }
    return {
        specs.NODE_ENGINES: dict(engines),
        specs.NODE_ENGINE_INFO: titles,
        **{k: dict(v) for k, v in numbers.items()},
    }


def _of_partitions(state: NodeState) -> dict[MetricSpec, Values]:
    capacity: Counter[tuple[str, ...]] = Counter({(HOST,): state.memory_bytes})
    places: Counter[tuple[str, ...]] = Counter()
    used: Values = {}
    partitions = [room for room in state.rooms if room.is_open]
    for partition in partitions:
        used |= {
            (partition.tenant, partition.name, tier): num
            for tier, num in (partition.used_bytes or {}).items()
        }
        capacity.update({(tier,): num for tier, num in (partition.capacity_bytes or {}).items()})
        places.update(
            {(partition.tenant, place): num for place, num in (partition.looked_up or {}).items()}
        )
    return {
        specs.NODE_CAPACITY_BYTES: dict(capacity),
        specs.NODE_LOOKUP_BLOCKS: dict(places),
        specs.NODE_ROOM_BYTES: used,
        specs.NODE_ROOM_SEGMENTS: {
            (partition.tenant, partition.name): partition.segments for partition in partitions
        },
        specs.NODE_BLOCK_BYTES: {
            (partition.tenant, partition.name): partition.block_bytes for partition in partitions
        },
    }


def _of_tenants(state: NodeState) -> dict[MetricSpec, Values]:
    size, tenants = state.segment_bytes, state.tenants.items()
    return {
        specs.NODE_TENANT_BYTES: {(name,): each.segments * size for name, each in tenants},
        specs.NODE_FLOOR_BYTES: {(name,): each.floor_bytes for name, each in tenants},
        specs.NODE_CEILING_BYTES: {
            (name,): state.memory_bytes if each.ceiling_bytes is None else each.ceiling_bytes
            for name, each in tenants
        },
        specs.NODE_PINNED_BYTES: {(name,): each.pinned_segments * size for name, each in tenants},
        specs.NODE_SLAB_BYTES: {(name,): each.slab_bytes for name, each in tenants},
        specs.NODE_DISK_FLOOR_BYTES: {(name,): each.disk_floor_bytes for name, each in tenants},
        specs.NODE_DISK_CEILING_BYTES: {
            (name,): each.disk_ceiling_bytes
            for name, each in tenants
            if each.disk_ceiling_bytes is not None
        },
    }
