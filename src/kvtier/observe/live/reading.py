"""One scrape of an engine's metrics, under kvtier's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isinf

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvtier.core.errors import CacheError, printable
from kvtier.observe import specs

Labels = tuple[tuple[str, str], ...]

MAX_LINES = 50_000
"""Most lines of a text."""
MAX_LINE = 16_384
"""Most characters of a line."""
MAX_SERIES = 2000
"""Most series of one metric, after those that differ in other labels are summed."""
MAX_PLACES = 64
"""Most tiers and stores of one engine."""
MAX_LABEL = 64
"""Most characters of a label's value; the rest is cut."""
MAX_VALUE = 2.0**63
MAX_MODELS = 4
"""Most names of models that are kept."""
MODEL = "model_name"
INFO = frozenset({specs.SERVER_INFO.name, specs.NODE_INFO.name})

UNDER_VLLM = f"{specs.VLLM_PREFIX}{specs.PREFIX}"
RENAMED = {
    spec.name: core.name + ("_sum" if core.kind == "histogram" else "")
    for spec in specs.UNDER_VLLM
    if (core := spec.counted_as) and core not in specs.SHARED_WITH_VLLM
}
"""The cache's name of a metric by its other name under vLLM."""
KEPT = frozenset({"tier", "src", "dst", "decision", "le", "source", "cache_source", "outcome"})
"""Labels that are kept. Values are summed over all others, such as model, engine and process."""
KEPT_OF_NODE = KEPT | {"tenant", "room", "engine", "place", "title"}
"""Labels that are kept of a node's metrics."""
ENGINE = "engine"
WORST = frozenset({specs.BREAKER_STATE.name, specs.QUEUED_SECONDS.name, specs.SLOT_BYTES.name})
"""Metrics whose series are merged by their maximum, not their sum."""
INFINITE = frozenset({specs.QUEUED_SECONDS.name})
"""Metrics that may be infinite."""
PLACES = frozenset({"tier", "src", "dst"})
"""Labels that name a tier."""
COUNTED = ("counter", "histogram", "summary")
ENDINGS = ("_total", "_count", "_sum", "_bucket")
"""Types of metrics that only grow, and suffixes of their names."""


class UnreadableError(CacheError):
    """The text is not an engine's metrics, or far too large.

    The message says which, without quoting the text.
    """


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of an engine's metrics.

    Attributes:
        at_s: time of the reading, in seconds of any monotonic clock.
        values: values by name and labels.
        growing: names of metrics that can't decrease while the server runs.
        models: names of the served models.
        version: kvtier's version; "" if the engine does not report it.
    """

    at_s: float
    values: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    growing: frozenset[str] = frozenset()
    models: tuple[str, ...] = ()
    version: str = ""

    @classmethod
    def parse(cls, text: str, at_s: float) -> Reading:
        """Return a reading from Prometheus' text format; raise ``UnreadableError`` otherwise."""
        if text.count("\n") >= MAX_LINES or max(map(len, text.split("\n"))) > MAX_LINE:
            raise UnreadableError(f"more than {MAX_LINES:,} lines, or one that is far too long")
        try:
            return cls.of(text_string_to_metric_families(text), at_s)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UnreadableError("no Prometheus metrics") from error

    @classmethod
    def of(cls, families: Iterable[Metric], at_s: float) -> Reading:
        """Return a reading from a registry's metrics, without impossible values.

        Raises:
            UnreadableError: there are more series, or more tiers, than one engine has.
        """
        values: dict[str, dict[Labels, float]] = {}
        growing: set[str] = set()
        places: set[str] = set()
        models: dict[str, None] = {}
        version = ""
        for family in families:
            for sample in family.samples:
                name = _canonical(sample.name)
                if sample.name.endswith("_created") or not _is_possible(name, sample.value):
                    continue
                model = printable(sample.labels.get(MODEL, "")[:MAX_LABEL])
                if model and len(models) < MAX_MODELS:
                    models[model] = None
                if name in INFO:
                    version = printable(sample.labels.get("version", "")[:MAX_LABEL])
                kept = _kept(name, sample.labels)
                # The counters of a node's engine end with the engine.
                may_fall = any(label == ENGINE for label, _ in kept)
                if family.type in (*COUNTED, "unknown") and name.endswith(ENDINGS) and not may_fall:
                    growing.add(name)
                by_labels = values.setdefault(name, {})
                places.update(value for label, value in kept if label in PLACES)
                if len(by_labels) > MAX_SERIES or len(places) > MAX_PLACES:
                    raise UnreadableError("more series than one engine has")
                before = by_labels.get(kept)
                if before is None:
                    by_labels[kept] = sample.value
                elif name in WORST:
                    by_labels[kept] = max(before, sample.value)
                else:
                    by_labels[kept] = before + sample.value
        return cls(at_s, values, frozenset(growing), tuple(models), version)

    def has(self, name: str) -> bool:
        """Whether the engine reports a metric, even if it is 0."""
        return name in self.values

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the series with these labels; None if the metric is missing."""
        by_labels = self.values.get(name)
        if by_labels is None:
            return None
        wanted = set(labels.items())
        return sum(value for at, value in by_labels.items() if wanted <= set(at))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums by the values of one label, in the order of the text."""
        found: dict[str, float] = {}
        for at, value in self.values.get(name, {}).items():
            key = dict(at).get(label)
            if key is not None:
                found[key] = found.get(key, 0.0) + value
        return found

    def by_route(self, name: str) -> dict[tuple[str, str], float]:
        """Return the sums by ``src`` and ``dst``."""
        found: dict[tuple[str, str], float] = {}
        for at, value in self.values.get(name, {}).items():
            labels = dict(at)
            if "src" in labels and "dst" in labels:
                route = labels["src"], labels["dst"]
                found[route] = found.get(route, 0.0) + value
        return found

    def has_fallen(self, before: Reading) -> bool:
        """Whether a counter has decreased since ``before``: the server has restarted."""
        for name in before.growing:
            now = self.values.get(name, {})
            if any(now.get(at, 0.0) < value for at, value in before.values[name].items()):
                return True
        return False


def _is_possible(name: str, value: float) -> bool:
    """Whether a metric may have this value: it must not be negative, NaN or too large."""
    return 0 <= value < MAX_VALUE or (name in INFINITE and isinf(value) and value > 0)


def _kept(name: str, labels: Mapping[str, str]) -> Labels:
    """Return the labels of a metric that are kept, as printable text."""
    names = KEPT_OF_NODE if name.startswith(specs.NODE_PREFIX) else KEPT
    kept = (item for item in labels.items() if item[0] in names)
    return tuple(sorted((label, printable(value[:MAX_LABEL])) for label, value in kept))


def _canonical(name: str) -> str:
    """Return the cache's name of a metric under vLLM, and any other name as it is."""
    if not name.startswith(UNDER_VLLM):
        return name
    return RENAMED.get(name, name.removeprefix(specs.VLLM_PREFIX))
