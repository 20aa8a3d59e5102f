"""Prometheus metrics: names, types, units and labels in one table.

``prometheus_client`` is imported only when metrics are created: on import it reads the folder of
multi-process metrics, which an engine sets after it has loaded its plug-ins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar, cast

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram

SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
AGES_S = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0, 100000.0)


@dataclass(slots=True)
class RequestRecord:
    """Record of what the cache did for one request, completed when its lease ends.

    hit_blocks: reused blocks by the tier they were found in.
    load_bytes: bytes copied to the device for it.
    load_s: time from the start of the copy until ready.
    arrivals: blocks of the prompt and their arrival, in seconds from the same start.
    """

    num_asked_blocks: int = 0
    hit_blocks: dict[str, int] = field(default_factory=dict)
    load_bytes: int = 0
    load_s: float = 0.0
    arrivals: list[tuple[range, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """Name, type and labels of one metric. Values are in base units.

    buckets: upper bounds of a histogram's buckets.
    over_processes: how prometheus_client merges a gauge of several processes of a server.
    """

    name: str
    kind: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS
    over_processes: Literal["livesum", "livemax"] = "livesum"


METRICS = (
    MetricSpec("kvtier_requests_total", "counter", "Requests that ended."),
    MetricSpec("kvtier_prompt_blocks_total", "counter", "Full blocks of prompts."),
    MetricSpec(
        "kvtier_hit_blocks_total",
        "counter",
        "Prompt blocks served from the cache, by the tier that held them.",
        ("tier",),
    ),
    MetricSpec(
        "kvtier_copied_bytes_total", "counter", "Bytes copied between tiers.", ("src", "dst")
    ),
    MetricSpec("kvtier_copy_seconds", "histogram", "Duration of one copy job.", ("src", "dst")),
    MetricSpec("kvtier_failed_copies_total", "counter", "Copy jobs that failed.", ("src", "dst")),
    MetricSpec(
        "kvtier_failed_blocks_total",
        "counter",
        "Blocks whose copy failed or whose content was damaged.",
        ("src", "dst"),
    ),
    MetricSpec("kvtier_late_loads_total", "counter", "Loads abandoned at their deadline."),
    MetricSpec("kvtier_load_seconds", "histogram", "Time a request waited for its load."),
    MetricSpec(
        "kvtier_lookup_seconds",
        "histogram",
        "Time of one look-up of a prompt's next blocks in a store.",
        ("tier",),
    ),
    MetricSpec("kvtier_evicted_blocks_total", "counter", "Blocks evicted from a tier.", ("tier",)),
    MetricSpec(
        "kvtier_refused_blocks_total",
        "counter",
        "Blocks not stored: every slot of the tier was held or in flight.",
        ("tier",),
    ),
    MetricSpec(
        "kvtier_unadmitted_blocks_total",
        "counter",
        "Blocks that the eviction policy did not admit to a full tier.",
        ("tier",),
    ),
    MetricSpec(
        "kvtier_unwritten_blocks_total",
        "counter",
        "Admitted blocks not written: evicted from memory first, or over the write budget.",
        ("tier",),
    ),
    MetricSpec(
        "kvtier_scrubbed_bytes_total", "counter", "Bytes verified in the background.", ("tier",)
    ),
    MetricSpec(
        "kvtier_damaged_blocks_total",
        "counter",
        "Blocks read from storage whose checksum or record did not match.",
        ("tier",),
    ),
    MetricSpec("kvtier_used_slots", "gauge", "Slots in use.", ("tier",)),
    MetricSpec("kvtier_slots", "gauge", "Slots of a tier.", ("tier",)),
    MetricSpec(
        "kvtier_slot_bytes",
        "gauge",
        "Bytes of one slot, summed over the ranks that hold a part of its block.",
        ("tier",),
        over_processes="livemax",
    ),
    MetricSpec(
        "kvtier_planned_blocks_total",
        "counter",
        "Cached blocks below the device, by the planner's decision: load or recompute.",
        ("decision",),
    ),
    MetricSpec(
        "kvtier_predicted_load_seconds_total",
        "counter",
        "Predicted time of copies towards the device, without queueing.",
        ("src",),
    ),
    MetricSpec(
        "kvtier_actual_load_seconds_total", "counter", "Actual time of the same copies.", ("src",)
    ),
    MetricSpec(
        "kvtier_load_error_ratio",
        "histogram",
        "Actual time of such a copy divided by its predicted time.",
        ("src",),
        RATIOS,
    ),
    MetricSpec(
        "kvtier_predicted_prefill_seconds_total",
        "counter",
        "Predicted time of prefills.",
    ),
    MetricSpec(
        "kvtier_actual_prefill_seconds_total", "counter", "Actual time of the same prefills."
    ),
    MetricSpec("kvtier_saved_tokens_total", "counter", "Prompt tokens served from the cache."),
    MetricSpec(
        "kvtier_saved_seconds_total",
        "counter",
        "Prefill time of these tokens, less the time that requests waited for loads.",
    ),
    MetricSpec(
        "kvtier_returned_blocks_total",
        "counter",
        "Evicted blocks that were requested again, estimated from a sample.",
        ("tier",),
    ),
    MetricSpec(
        "kvtier_return_seconds",
        "histogram",
        "Time from a sampled block's eviction to its first later request.",
        ("tier",),
        AGES_S,
    ),
    MetricSpec(
        "kvtier_breaker_state",
        "gauge",
        "State of a storage tier: 0 in use, 1 being retried, 2 paused after errors, 3 its slab was "
        "cut short.",
        ("tier",),
        over_processes="livemax",
    ),
    MetricSpec(
        "kvtier_transfers_in_flight",
        "gauge",
        "Copies that have begun and not ended.",
        ("src", "dst"),
    ),
    MetricSpec(
        "kvtier_queued_seconds",
        "gauge",
        "Predicted wait of a copy that is queued now; infinite while the tier takes none.",
        ("src", "dst"),
        over_processes="livemax",
    ),
)

T = TypeVar("T", "Counter", "Gauge", "Histogram")

Counts = dict[tuple[str, tuple[str, ...]], float]
"""Counter values by metric and label values."""

Observations = dict[tuple[str, tuple[str, ...]], list[float]]

TOLD_BY_ENGINES = frozenset(
    {
        "kvtier_planned_blocks_total",
        "kvtier_unadmitted_blocks_total",
        "kvtier_predicted_load_seconds_total",
        "kvtier_actual_load_seconds_total",
        "kvtier_load_error_ratio",
        "kvtier_predicted_prefill_seconds_total",
        "kvtier_actual_prefill_seconds_total",
        "kvtier_saved_tokens_total",
        "kvtier_saved_seconds_total",
        "kvtier_returned_blocks_total",
        "kvtier_return_seconds",
        "kvtier_breaker_state",
        "kvtier_slot_bytes",
        "kvtier_transfers_in_flight",
        "kvtier_queued_seconds",
    }
)
"""Metrics that an engine with metrics of its own exports under the same names, with its prefix."""

UNDER_VLLM = {
    "kvtier_loaded_chunks_total": "kvtier_hit_blocks_total",
    "kvtier_evicted_chunks_total": "kvtier_evicted_blocks_total",
    "kvtier_moved_bytes_total": "kvtier_copied_bytes_total",
    "kvtier_moved_seconds_total": "kvtier_copy_seconds_sum",
    "kvtier_failed_chunks_total": "kvtier_failed_blocks_total",
    "kvtier_damaged_chunks_total": "kvtier_damaged_blocks_total",
    "kvtier_not_demoted_chunks_total": "kvtier_unwritten_blocks_total",
    "kvtier_refused_chunks_total": "kvtier_refused_blocks_total",
    "kvtier_used_chunks": "kvtier_used_slots",
    "kvtier_chunks": "kvtier_slots",
}
"""Metrics with other names under vLLM: from the name there, without prefix, to kvtier's."""

MOST_OBSERVED = 4096
"""Maximum number of observations kept per metric and label values until they are taken."""


class Metrics:
    """The metrics of one cache, in their own registry.

    is_exposed: False if an engine exports the numbers in its own metrics, or if nothing reads them;
    the registry is empty then.
    """

    def __init__(self, is_exposed: bool = True) -> None:
        from prometheus_client import CollectorRegistry

        self.registry = CollectorRegistry()
        self._is_exposed = is_exposed
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._found: dict[tuple[object, ...], Counter | Gauge | Histogram] = {}
        self._recent: Counts = {}
        self._levels: Counts = {}
        self._observed: dict[str, dict[tuple[str, ...], deque[float]]] = {}
        for spec in METRICS if is_exposed else ():
            self._expose(spec)

    def _expose(self, spec: MetricSpec) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        if spec.kind == "counter":
            made = Counter(spec.name, spec.meaning, spec.labels, registry=self.registry)
            self._counters[spec.name] = made
        elif spec.kind == "gauge":
            self._gauges[spec.name] = Gauge(
                spec.name,
                spec.meaning,
                spec.labels,
                registry=self.registry,
                multiprocess_mode=spec.over_processes,
            )
        else:
            self._histograms[spec.name] = Histogram(
                spec.name, spec.meaning, spec.labels, registry=self.registry, buckets=spec.buckets
            )

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        if self._is_exposed:
            self._with_labels(self._counters, name, labels).inc(amount)
        self._add(name, amount, labels)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        if self._is_exposed:
            self._with_labels(self._gauges, name, labels).set(value)
        self._levels[name, tuple(labels.values())] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        if self._is_exposed:
            self._with_labels(self._histograms, name, labels).observe(value)
        self._add(name, value, labels)
        if name in self._observed:
            empty: deque[float] = deque(maxlen=MOST_OBSERVED)
            self._observed[name].setdefault(tuple(labels.values()), empty).append(value)

    def _with_labels(self, metrics: Mapping[str, T], name: str, labels: Mapping[str, str]) -> T:
        """Return the metric with these labels. Cached: the look-up costs more than counting."""
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
        """Return sums of what was counted and observed since the last call, by name and labels.

        For an engine with its own metrics.
        """
        recent, self._recent = self._recent, {}
        return recent

    def take_levels(self) -> Counts:
        """Return the gauges that were set since the last call."""
        levels, self._levels = self._levels, {}
        return levels

    def keep_observations(self, names: Iterable[str]) -> None:
        """Keep the single observations of these histograms for ``take_observations``."""
        self._observed = {name: {} for name in names}

    def take_observations(self) -> Observations:
        """Return the single observations since the last call; only the latest if there are many."""
        taken: Observations = {}
        for name, by_labels in self._observed.items():
            for labels, values in by_labels.items():
                taken[name, labels] = list(values)
            by_labels.clear()
        return taken

    def record(self, record: RequestRecord) -> None:
        """Count one request."""
        self.count("kvtier_requests_total")
        self.count("kvtier_prompt_blocks_total", record.num_asked_blocks)
        for tier, num_blocks in record.hit_blocks.items():
            self.count("kvtier_hit_blocks_total", num_blocks, tier=tier)
        if record.load_bytes:
            self.observe("kvtier_load_seconds", record.load_s)

    def occupancy(self, used: Mapping[str, int], slots: Mapping[str, int]) -> None:
        """Set the slots in use and in total, per tier."""
        for tier, num_slots in slots.items():
            self.gauge("kvtier_slots", num_slots, tier=tier)
            self.gauge("kvtier_used_slots", used[tier], tier=tier)
