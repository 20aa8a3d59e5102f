"""Counters beside vLLM's own metrics: one table, and the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvtier.connectors.common.recording import MEANING
from kvtier.telemetry import METRICS as CORES
from kvtier.telemetry import MetricSpec
from kvtier.telemetry.metrics import TOLD_BY_ENGINES

PREFIX = "vllm:"
"""By how a name begins vLLM knows what to take away with an engine."""


def _counter(name: str, meaning: str, *labels: str) -> MetricSpec:
    """Its name is what Prometheus shows, without ``_total``."""
    return MetricSpec(f"{PREFIX}{name}", "counter", meaning, labels)


def _gauge(name: str, meaning: str, *labels: str) -> MetricSpec:
    return MetricSpec(f"{PREFIX}{name}", "gauge", meaning, labels)


LOADED = _counter(
    "kvtier_loaded_chunks", "Blocks given to requests, by the tier that had them.", "tier"
)
EVICTED = _counter("kvtier_evicted_chunks", "Blocks that left a tier for others.", "tier")
MOVED_BYTES = _counter(
    "kvtier_moved_bytes",
    "Bytes moved from and to storage, per rank: by way of host memory, or straight to the device.",
    "src",
    "dst",
)
MOVED_SECONDS = _counter(
    "kvtier_moved_seconds", "What that took, without the time in line.", "src", "dst"
)
FAILED = _counter(
    "kvtier_failed_chunks", "Blocks that could not be moved, or were damaged.", "src", "dst"
)
DAMAGED = _counter(
    "kvtier_damaged_chunks", "Blocks that storage could not give back as they were.", "tier"
)
RECOMPUTED = _counter(
    "kvtier_recomputed_chunks", "Blocks found, and not loaded: computing them takes less time."
)
IMPATIENT = _counter(
    "kvtier_impatient_requests",
    "Requests that waited as long as computing takes, and no longer.",
)
NOT_DEMOTED = _counter(
    "kvtier_not_demoted_chunks",
    "Blocks that left host memory before storage had taken them, or were over its budget.",
    "tier",
)
REFUSED = _counter("kvtier_refused_chunks", "Blocks a full tier had no room for.", "tier")
RECORDED = _counter("kvtier_recorded_requests", MEANING, "outcome")
USED = _gauge("kvtier_used_chunks", "Blocks in a tier.", "tier")
ROOM = _gauge("kvtier_chunks", "Room for blocks in a tier.", "tier")
UNCLAIMED = _gauge(
    "kvtier_unclaimed_chunks", "Blocks that a restart found and nobody has asked for yet.", "tier"
)
SHARED = {
    spec.name: replace(spec, name=PREFIX + spec.name.removesuffix("_total"))
    for spec in CORES
    if spec.name in TOLD_BY_ENGINES
}
"""What the core counts, by its own name there: the same in all engines."""

METRICS = (
    LOADED,
    EVICTED,
    MOVED_BYTES,
    MOVED_SECONDS,
    FAILED,
    DAMAGED,
    RECOMPUTED,
    IMPATIENT,
    NOT_DEMOTED,
    REFUSED,
    RECORDED,
    USED,
    ROOM,
    *SHARED.values(),
)
OURS = {
    "kvtier_evicted_blocks_total": EVICTED,
    "kvtier_copied_bytes_total": MOVED_BYTES,
    "kvtier_copy_seconds": MOVED_SECONDS,
    "kvtier_failed_blocks_total": FAILED,
    "kvtier_damaged_blocks_total": DAMAGED,
    "kvtier_unwritten_blocks_total": NOT_DEMOTED,
    "kvtier_refused_blocks_total": REFUSED,
}
"""What the core counts, and what it is called under vLLM."""
OURS.update((name, spec) for name, spec in SHARED.items() if spec.kind == "counter")

Labels = tuple[str, ...]


class Counts:
    """Numbers by metric and labels."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[MetricSpec, Labels], float] = {}

    def add(self, metric: MetricSpec, number: float, *labels: str) -> None:
        """Count; nothing for 0."""
        assert metric.kind == "counter", f"{metric.name} is not counted, it is looked up"
        assert len(labels) == len(metric.labels), f"{metric.name} is counted by {metric.labels}"
        if number:
            at = (metric, labels)
            self._numbers[at] = self._numbers.get(at, 0) + number

    def add_all(self, recent: Mapping[tuple[str, Labels], float]) -> None:
        """Add the counts of the core."""
        for (name, labels), number in recent.items():
            if name in OURS:
                self.add(OURS[name], number, *labels)

    def take(self) -> dict[tuple[MetricSpec, Labels], float]:
        """Return the counts since the last call."""
        numbers, self._numbers = self._numbers, {}
        return numbers
