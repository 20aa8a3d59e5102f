"""Prometheus metrics: names, types, units and labels in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtier.telemetry.record import RequestRecord


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: base units, few labels."""

    name: str
    kind: str
    meaning: str
    labels: tuple[str, ...] = ()


METRICS = (
    MetricSpec("kvtier_requests_total", "counter", "Requests whose lease ended."),
    MetricSpec("kvtier_prompt_blocks_total", "counter", "Full blocks in prompts."),
    MetricSpec(
        "kvtier_hit_blocks_total", "counter", "Blocks reused, by where they were.", ("tier",)
    ),
    MetricSpec("kvtier_copied_bytes_total", "counter", "Bytes copied.", ("src", "dst")),
    MetricSpec("kvtier_copy_seconds", "histogram", "Duration of one copy job.", ("src", "dst")),
    MetricSpec("kvtier_failed_copies_total", "counter", "Copy jobs that failed.", ("src", "dst")),
    MetricSpec(
        "kvtier_failed_blocks_total",
        "counter",
        "Blocks that did not arrive, or not as they were.",
        ("src", "dst"),
    ),
    MetricSpec("kvtier_late_loads_total", "counter", "Loads given up at their deadline."),
    MetricSpec("kvtier_load_seconds", "histogram", "Time a request waited for its load."),
    MetricSpec(
        "kvtier_lookup_seconds",
        "histogram",
        "Time until a store had said what it has of a prompt's next blocks.",
        ("tier",),
    ),
    MetricSpec("kvtier_evicted_blocks_total", "counter", "Blocks that left a tier.", ("tier",)),
    MetricSpec(
        "kvtier_refused_blocks_total", "counter", "Blocks a full tier had no room for.", ("tier",)
    ),
    MetricSpec(
        "kvtier_unwritten_blocks_total",
        "counter",
        "Blocks worth a write that left memory before storage took them, or were over its budget.",
        ("tier",),
    ),
    MetricSpec(
        "kvtier_scrubbed_bytes_total", "counter", "Bytes verified in the background.", ("tier",)
    ),
    MetricSpec(
        "kvtier_damaged_blocks_total",
        "counter",
        "Blocks that storage could not give back as they were.",
        ("tier",),
    ),
    MetricSpec("kvtier_used_slots", "gauge", "Slots in use.", ("tier",)),
    MetricSpec("kvtier_slots", "gauge", "Slots in all.", ("tier",)),
)

T = TypeVar("T", Counter, Gauge, Histogram)

Counts = dict[tuple[str, tuple[str, ...]], float]
"""Numbers by metric and the values of its labels."""

_SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


class Metrics:
    """The metrics of one cache, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._found: dict[tuple[object, ...], Counter | Gauge | Histogram] = {}
        self._recent: Counts = {}
        for spec in METRICS:
            if spec.kind == "counter":
                made = Counter(spec.name, spec.meaning, spec.labels, registry=self.registry)
                self._counters[spec.name] = made
            elif spec.kind == "gauge":
                gauge = Gauge(spec.name, spec.meaning, spec.labels, registry=self.registry)
                self._gauges[spec.name] = gauge
            else:
                self._histograms[spec.name] = Histogram(
                    spec.name, spec.meaning, spec.labels, registry=self.registry, buckets=_SECONDS
                )

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        self._with_labels(self._counters, name, labels).inc(amount)
        self._add(name, amount, labels)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self._with_labels(self._gauges, name, labels).set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._with_labels(self._histograms, name, labels).observe(value)
        self._add(name, value, labels)

    def _with_labels(self, metrics: Mapping[str, T], name: str, labels: Mapping[str, str]) -> T:
        """The one that counts for these labels; to find it among all costs more than to count."""
        at = name, *labels.items()
        found = cast("T | None", self._found.get(at))
        if found is None:
            found = metrics[name].labels(**labels) if labels else metrics[name]
            self._found[at] = found
        return found

    def _add(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        at = (name, tuple(labels.values()))
        self._recent[at] = self._recent.get(at, 0.0) + value

    def take_recent(self) -> Counts:
        """Sums of what was counted and observed since the last call, by name and labels: for an
        engine with metrics of its own."""
        recent, self._recent = self._recent, {}
        return recent

    def record(self, record: RequestRecord) -> None:
        """Count one request."""
        self.count("kvtier_requests_total")
        self.count("kvtier_prompt_blocks_total", record.num_asked_blocks)
        for tier, num_blocks in record.hit_blocks.items():
            self.count("kvtier_hit_blocks_total", num_blocks, tier=tier)
        if record.load_bytes:
            self.observe("kvtier_load_seconds", record.load_s)

    def occupancy(self, used: Mapping[str, int], slots: Mapping[str, int]) -> None:
        """Slots in use and in all, per tier."""
        for tier, num_slots in slots.items():
            self.gauge("kvtier_slots", num_slots, tier=tier)
            self.gauge("kvtier_used_slots", used[tier], tier=tier)
