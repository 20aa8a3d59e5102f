"""Metrics of a node: those of its rooms with their names as labels, and its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvtier.node.control import NodeState
from kvtier.telemetry.metrics import MetricSpec

NODE_METRICS = (
    MetricSpec("kvtier_node_info", "gauge", "1; the label names kvtier's version.", ("version",)),
    MetricSpec("kvtier_node_uptime_seconds", "gauge", "Time since the node started."),
    MetricSpec("kvtier_node_engines", "gauge", "Attached engines.", ("tenant",)),
    MetricSpec("kvtier_node_processes", "gauge", "Processes of attached engines.", ("tenant",)),
    MetricSpec(
        "kvtier_node_engine_slots", "gauge", "Slots that engines read or write.", ("tenant",)
    ),
    MetricSpec("kvtier_node_memory_bytes", "gauge", "Host memory of the node."),
    MetricSpec("kvtier_node_free_bytes", "gauge", "Host memory that belongs to no room."),
    MetricSpec(
        "kvtier_node_unverified_blocks",
        "gauge",
        "Blocks in memory of the node before that are yet to be verified.",
    ),
    MetricSpec(
        "kvtier_node_slots_aside",
        "gauge",
        "Slots that engines of the node before may use, and that are not given out.",
    ),
    MetricSpec("kvtier_node_tenant_bytes", "gauge", "Host memory of a tenant.", ("tenant",)),
    MetricSpec("kvtier_node_floor_bytes", "gauge", "Floor of a tenant's quota.", ("tenant",)),
    MetricSpec(
        "kvtier_node_ceiling_bytes",
        "gauge",
        "Ceiling of a tenant's quota; all memory if it has none.",
        ("tenant",),
    ),
    MetricSpec(
        "kvtier_node_pinned_bytes",
        "gauge",
        "Host memory of a tenant in segments with pinned blocks.",
        ("tenant",),
    ),
)

RoomRegistries = Mapping[tuple[str, str], CollectorRegistry]
"""By tenant and name of the room, its registry."""


def metrics_text(state: NodeState, rooms: RoomRegistries) -> bytes:
    """Return all metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_NodeCollector(state, rooms))
    return generate_latest(registry)


class _NodeCollector(Collector):
    def __init__(self, state: NodeState, rooms: RoomRegistries) -> None:
        self._state = state
        self._rooms = rooms

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        values = _values(self._state)
        for spec in NODE_METRICS:
            family = GaugeMetricFamily(spec.name, spec.meaning, labels=spec.labels)
            for labels, value in values[spec.name].items():
                family.add_metric(labels, value)
            yield family
        yield from _labelled(self._rooms)


def _labelled(rooms: RoomRegistries) -> Iterable[Metric]:
    """Return the rooms' metrics, each once, with the labels tenant and room."""
    merged: dict[str, Metric] = {}
    for (tenant, room), registry in rooms.items():
        for family in registry.collect():
            one = merged.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            one.samples += [
                sample._replace(labels={**sample.labels, "tenant": tenant, "room": room})
                for sample in family.samples
            ]
    return merged.values()


def _values(state: NodeState) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the values of the node's own metrics by name and labels."""
    size = state.segment_bytes
    engines: Counter[tuple[str, ...]] = Counter()
    processes: Counter[tuple[str, ...]] = Counter()
    slots: Counter[tuple[str, ...]] = Counter()
    for engine in state.engines:
        engines[engine.tenant,] += 1
        processes[engine.tenant,] += len(engine.pids)
        slots[engine.tenant,] += engine.slots
    tenants = state.tenants.items()
    return {
        "kvtier_node_info": {(state.version,): 1},
        "kvtier_node_uptime_seconds": {(): state.uptime_s},
        "kvtier_node_engines": dict(engines),
        "kvtier_node_processes": dict(processes),
        "kvtier_node_engine_slots": dict(slots),
        "kvtier_node_memory_bytes": {(): state.memory_bytes},
        "kvtier_node_free_bytes": {(): state.free_segments * size},
        "kvtier_node_unverified_blocks": {(): state.unverified_blocks},
        "kvtier_node_slots_aside": {(): state.slots_aside},
        "kvtier_node_tenant_bytes": {(name,): each.segments * size for name, each in tenants},
        "kvtier_node_floor_bytes": {(name,): each.floor_bytes for name, each in tenants},
        "kvtier_node_ceiling_bytes": {
            (name,): state.memory_bytes if each.ceiling_bytes is None else each.ceiling_bytes
            for name, each in tenants
        },
        "kvtier_node_pinned_bytes": {
            (name,): each.pinned_segments * size for name, each in tenants
        },
    }
