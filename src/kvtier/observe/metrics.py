"""Values of the cache's metrics. ``specs`` declares the metrics.

``prometheus_client`` is imported only when metrics are created: on import it reads the folder of
multi-process metrics, which an engine sets after it has loaded its plug-ins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

from kvtier.observe.specs import (
    CACHE,
    HIT_BLOCKS,
    LOAD_SECONDS,
    PROMPT_BLOCKS,
    REQUESTS,
    SLOTS,
    USED_SLOTS,
    MetricSpec,
)

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram


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


T = TypeVar("T", "Counter", "Gauge", "Histogram")

Counts = dict[tuple[MetricSpec, tuple[str, ...]], float]
"""Counter values by metric and label values."""

Observations = dict[tuple[MetricSpec, tuple[str, ...]], list[float]]

MAX_OBSERVED = 4096
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
        self._counters: dict[MetricSpec, Counter] = {}
        self._gauges: dict[MetricSpec, Gauge] = {}
        self._histograms: dict[MetricSpec, Histogram] = {}
        self._found: dict[tuple[object, ...], Counter | Gauge | Histogram] = {}
        self._recent: Counts = {}
        self._levels: Counts = {}
        self._observed: dict[MetricSpec, dict[tuple[str, ...], deque[float]]] = {}
        for spec in CACHE if is_exposed else ():
            self._expose(spec)

    def _expose(self, spec: MetricSpec) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        if spec.kind == "counter":
            made = Counter(spec.name, spec.meaning, spec.labels, registry=self.registry)
            self._counters[spec] = made
        elif spec.kind == "gauge":
            self._gauges[spec] = Gauge(
                spec.name,
                spec.meaning,
                spec.labels,
                registry=self.registry,
                multiprocess_mode=spec.over_processes,
            )
        else:
            self._histograms[spec] = Histogram(
                spec.name, spec.meaning, spec.labels, registry=self.registry, buckets=spec.buckets
            )

    def count(self, metric: MetricSpec, amount: float = 1, **labels: str) -> None:
        if self._is_exposed:
            self._with_labels(self._counters, metric, labels).inc(amount)
        self._add(metric, amount, labels)

    def gauge(self, metric: MetricSpec, value: float, **labels: str) -> None:
        if self._is_exposed:
            self._with_labels(self._gauges, metric, labels).set(value)
        self._levels[metric, tuple(labels.values())] = value

    def observe(self, metric: MetricSpec, value: float, **labels: str) -> None:
        if self._is_exposed:
            self._with_labels(self._histograms, metric, labels).observe(value)
        self._add(metric, value, labels)
        if metric in self._observed:
            empty: deque[float] = deque(maxlen=MAX_OBSERVED)
            self._observed[metric].setdefault(tuple(labels.values()), empty).append(value)

    def _with_labels(
        self, metrics: Mapping[MetricSpec, T], metric: MetricSpec, labels: Mapping[str, str]
    ) -> T:
        """Return the metric with these labels. Cached: the look-up costs more than counting."""
        at = metric, *labels.items()
        found = cast("T | None", self._found.get(at))
        if found is None:
            found = metrics[metric].labels(**labels) if labels else metrics[metric]
            self._found[at] = found
        return found

    def _add(self, metric: MetricSpec, value: float, labels: Mapping[str, str]) -> None:
        at = (metric, tuple(labels.values()))
        self._recent[at] = self._recent.get(at, 0.0) + value

    def take_recent(self) -> Counts:
        """Return sums of what was counted and observed since the last call, by metric and labels.

        For an engine with its own metrics.
        """
        recent, self._recent = self._recent, {}
        return recent

    def take_levels(self) -> Counts:
        """Return the gauges that were set since the last call."""
        levels, self._levels = self._levels, {}
        return levels

    def keep_observations(self, metrics: Iterable[MetricSpec]) -> None:
        """Keep the single observations of these histograms for ``take_observations``."""
        self._observed = {metric: {} for metric in metrics}

    def take_observations(self) -> Observations:
        """Return the single observations since the last call; only the latest if there are many."""
        taken: Observations = {}
        for metric, by_labels in self._observed.items():
            for labels, values in by_labels.items():
                taken[metric, labels] = list(values)
            by_labels.clear()
        return taken

    def record(self, record: RequestRecord) -> None:
        """Count one request."""
        self.count(REQUESTS)
        self.count(PROMPT_BLOCKS, record.num_asked_blocks)
        for tier, num_blocks in record.hit_blocks.items():
            self.count(HIT_BLOCKS, num_blocks, tier=tier)
        if record.load_bytes:
            self.observe(LOAD_SECONDS, record.load_s)

    def occupancy(self, used: Mapping[str, int], slots: Mapping[str, int]) -> None:
        """Set the slots in use and in total, per tier."""
        for tier, num_slots in slots.items():
            self.gauge(SLOTS, num_slots, tier=tier)
            self.gauge(USED_SLOTS, used[tier], tier=tier)
