"""What is counted under vLLM, beside its own metrics: one table, and the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter, or a gauge. Its name is what Prometheus shows, without ``_total``; by how it
    begins vLLM knows what to take away with an engine."""

    name: str
    meaning: str
    labels: tuple[str, ...] = ()
    is_gauge: bool = False


LOADED = Metric(
    "vllm:kvtier_loaded_chunks", "Blocks given to requests, by the tier that had them.", ("tier",)
)
EVICTED = Metric("vllm:kvtier_evicted_chunks", "Blocks that left a tier for others.", ("tier",))
MOVED_BYTES = Metric(
    "vllm:kvtier_moved_bytes",
    "Bytes moved between host memory and storage, per rank.",
    ("src", "dst"),
)
MOVED_SECONDS = Metric(
    "vllm:kvtier_moved_seconds", "What that took, without the time in line.", ("src", "dst")
)
FAILED = Metric(
    "vllm:kvtier_failed_chunks", "Blocks that could not be moved, or were damaged.", ("src", "dst")
)
RECOMPUTED = Metric(
    "vllm:kvtier_recomputed_chunks", "Blocks found, and not loaded: computing them takes less time."
)
IMPATIENT = Metric(
    "vllm:kvtier_impatient_requests",
    "Requests that waited as long as computing takes, and no longer.",
)
NOT_DEMOTED = Metric(
    "vllm:kvtier_not_demoted_chunks",
    "Blocks that left host memory before storage had taken them, or were over its budget.",
    ("tier",),
)
USED = Metric("vllm:kvtier_used_chunks", "Blocks in a tier.", ("tier",), is_gauge=True)
ROOM = Metric("vllm:kvtier_chunks", "Room for blocks in a tier.", ("tier",), is_gauge=True)

METRICS = (
    LOADED,
    EVICTED,
    MOVED_BYTES,
    MOVED_SECONDS,
    FAILED,
    RECOMPUTED,
    IMPATIENT,
    NOT_DEMOTED,
    USED,
    ROOM,
)
OURS = {
    "kvtier_evicted_blocks_total": EVICTED,
    "kvtier_copied_bytes_total": MOVED_BYTES,
    "kvtier_copy_seconds": MOVED_SECONDS,
    "kvtier_failed_blocks_total": FAILED,
    "kvtier_unwritten_blocks_total": NOT_DEMOTED,
}
"""What the core counts, and what it is called under vLLM."""

Labels = tuple[str, ...]


class Counts:
    """Numbers by metric and labels."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Metric, Labels], float] = {}

    def add(self, metric: Metric, number: float, *labels: str) -> None:
        """Count; nothing for 0."""
        assert not metric.is_gauge, f"{metric.name} is not counted, it is looked up"
        assert len(labels) == len(metric.labels), f"{metric.name} is counted by {metric.labels}"
        if number:
            at = (metric, labels)
            self._numbers[at] = self._numbers.get(at, 0) + number

    def add_all(self, recent: Mapping[tuple[str, Labels], float]) -> None:
        """What the core has counted."""
        for (name, labels), number in recent.items():
            if name in OURS:
                self.add(OURS[name], number, *labels)

    def take(self) -> dict[tuple[Metric, Labels], float]:
        """What was counted since the last call."""
        numbers, self._numbers = self._numbers, {}
        return numbers
