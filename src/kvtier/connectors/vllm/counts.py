"""Counters beside vLLM's own metrics: one table, and the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvtier.connectors.common.recording import MEANING
from kvtier.telemetry import METRICS as CORES
from kvtier.telemetry import Metrics, MetricSpec
from kvtier.telemetry.metrics import TOLD_BY_ENGINES

PREFIX = "vllm:"
"""Prefix by which vLLM removes the metrics of an engine that has gone."""


def _counter(name: str, meaning: str, *labels: str) -> MetricSpec:
    """Return a counter; Prometheus shows its name with ``_total`` appended."""
    return MetricSpec(f"{PREFIX}{name}", "counter", meaning, labels)


def _gauge(name: str, meaning: str, *labels: str) -> MetricSpec:
    return MetricSpec(f"{PREFIX}{name}", "gauge", meaning, labels)


LOADED = _counter(
    "kvtier_loaded_chunks", "Blocks loaded for requests, by the tier that held them.", "tier"
)
EVICTED = _counter("kvtier_evicted_chunks", "Blocks evicted from a tier.", "tier")
MOVED_BYTES = _counter(
    "kvtier_moved_bytes",
    "Bytes read from and written to storage, per rank, through host memory or directly; with "
    "KvtierConnector also those copied between host memory and the device.",
    "src",
    "dst",
)
MOVED_SECONDS = _counter(
    "kvtier_moved_seconds", "Time of these transfers, without queueing.", "src", "dst"
)
FAILED = _counter(
    "kvtier_failed_chunks",
    "Blocks whose transfer failed or whose content was damaged.",
    "src",
    "dst",
)
DAMAGED = _counter(
    "kvtier_damaged_chunks",
    "Blocks read from storage whose checksum or record did not match.",
    "tier",
)
RECOMPUTED = _counter(
    "kvtier_recomputed_chunks", "Blocks found and not loaded, since recomputing them is faster."
)
IMPATIENT = _counter(
    "kvtier_impatient_requests",
    "Requests that stopped waiting for a load once recomputing would have been faster.",
)
NOT_DEMOTED = _counter(
    "kvtier_not_demoted_chunks",
    "Blocks not written to storage: evicted from host memory first, or over the write budget.",
    "tier",
)
REFUSED = _counter(
    "kvtier_refused_chunks",
    "Blocks not stored: every slot of the tier was held or in flight.",
    "tier",
)
HINT_ACTIONS = _counter(
    "kvtier_hint_actions",
    "Actions in orchestrators' kv_hints: kv.fetch and kvtier.hint were read, unknown and invalid "
    "ones ignored.",
    "action",
)
RECORDED = _counter("kvtier_recorded_requests", MEANING, "outcome")
USED = _gauge("kvtier_used_chunks", "Blocks in a tier.", "tier")
ROOM = _gauge("kvtier_chunks", "Blocks that a tier has slots for.", "tier")
UNCLAIMED = _gauge(
    "kvtier_unclaimed_chunks",
    "Blocks found on disk after a restart and not requested since.",
    "tier",
)
SHARED = {
    spec.name: replace(spec, name=PREFIX + spec.name.removesuffix("_total"))
    for spec in CORES
    if spec.name in TOLD_BY_ENGINES
}
"""Metrics with the same name under every engine, by the core's name."""

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
    HINT_ACTIONS,
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
"""Metrics under vLLM, by the core's name of the same count."""
OURS.update((name, spec) for name, spec in SHARED.items() if spec.kind == "counter")

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

    def add_all(self, recent: Mapping[tuple[str, Labels], float]) -> None:
        """Add the counts of the core."""
        for (name, labels), number in recent.items():
            if name in OURS:
                self.add(OURS[name], number, *labels)

    def take(self) -> dict[tuple[MetricSpec, Labels], float]:
        """Return the counts since the last call."""
        numbers, self._numbers = self._numbers, {}
        return numbers


@dataclass(frozen=True, slots=True)
class MetricValues:
    """Values of metrics, by name and labels.

    counters: increases. observations: new values of histograms. gauges: levels.
    """

    counters: Mapping[tuple[str, Labels], float]
    observations: Mapping[tuple[str, Labels], Sequence[float]]
    gauges: Mapping[tuple[str, Labels], float]


def take_values(
    counts: Counts, metrics: Metrics, used: Mapping[str, int], room: Mapping[str, int]
) -> MetricValues | None:
    """Return the metric values since the last call; None if there are none.

    metrics: metrics of the core. used, room: slots by tier.
    """
    counts.add_all(metrics.take_recent())
    counted, levels = counts.take(), metrics.take_levels()
    if not counted and not levels:
        return None
    observed = metrics.take_observations()
    gauges = {
        (SHARED[name].name, labels): level
        for (name, labels), level in levels.items()
        if name in SHARED
    }
    for gauge, slots in (USED, used), (ROOM, room):
        gauges.update({(gauge.name, (tier,)): num for tier, num in slots.items()})
    return MetricValues(
        {(metric.name, labels): number for (metric, labels), number in counted.items()},
        {(SHARED[name].name, labels): values for (name, labels), values in observed.items()},
        gauges,
    )
