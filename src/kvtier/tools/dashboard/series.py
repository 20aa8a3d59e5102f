"""Table of the series that a panel or an alert may use, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from kvtier.connectors.vllm.counts import METRICS as UNDER_VLLM
from kvtier.telemetry.metrics import METRICS, MetricSpec
from kvtier.telemetry.node import NODE_METRICS
from kvtier.telemetry.server import SERVER_METRICS


class EngineKind(StrEnum):
    """Source of a series: the server whose ``/metrics`` has it."""

    KVTIER = "kvtier serve"
    VLLM = "vLLM"
    SGLANG = "SGLang"
    NODE = "kvtier node"


@dataclass(frozen=True, slots=True)
class Series:
    """One metric in Prometheus.

    A histogram's name is without ``_bucket``, ``_sum`` and ``_count``. labels: labels that
    distinguish its series.
    """

    name: str
    kind: str
    meaning: str
    labels: tuple[str, ...]
    engine: EngineKind


ENGINES_OWN = (
    # vLLM 0.32
    MetricSpec("vllm:prompt_tokens_total", "counter", "Tokens in prompts."),
    MetricSpec("vllm:prompt_tokens_cached_total", "counter", "Prompt tokens served from caches."),
    MetricSpec(
        "vllm:prompt_tokens_cached_by_source_total",
        "counter",
        "Prompt tokens served from caches, by source.",
        ("source",),
    ),
    MetricSpec("vllm:generation_tokens_total", "counter", "Tokens in answers."),
    MetricSpec(
        "vllm:request_success_total", "counter", "Requests that ended.", ("finished_reason",)
    ),
    MetricSpec("vllm:num_requests_running", "gauge", "Running requests."),
    MetricSpec("vllm:num_requests_waiting", "gauge", "Waiting requests."),
    MetricSpec("vllm:kv_cache_usage_perc", "gauge", "Share of the device's KV memory in use."),
    MetricSpec("vllm:time_to_first_token_seconds", "histogram", "Time to the first token."),
    MetricSpec("vllm:e2e_request_latency_seconds", "histogram", "Time to the end of an answer."),
    MetricSpec("vllm:kv_offload_load_bytes_total", "counter", "Bytes copied from host to device."),
    MetricSpec("vllm:kv_offload_store_bytes_total", "counter", "Bytes copied from device to host."),
    # SGLang 0.5.23
    MetricSpec("sglang:prompt_tokens_total", "counter", "Tokens in prompts."),
    MetricSpec(
        "sglang:cached_tokens_total",
        "counter",
        "Prompt tokens served from caches, by source.",
        ("cache_source",),
    ),
    MetricSpec("sglang:generation_tokens_total", "counter", "Tokens in answers."),
    MetricSpec("sglang:num_requests_total", "counter", "Requests that ended."),
    MetricSpec("sglang:num_running_reqs", "gauge", "Running requests."),
    MetricSpec("sglang:num_queue_reqs", "gauge", "Waiting requests."),
    MetricSpec("sglang:token_usage", "gauge", "Share of the device's KV memory in use."),
    MetricSpec("sglang:hicache_host_used_tokens", "gauge", "Tokens in SGLang's host memory."),
    MetricSpec(
        "sglang:hicache_host_total_tokens",
        "gauge",
        "Tokens that SGLang's host memory has slots for.",
    ),
    MetricSpec("sglang:evicted_tokens_total", "counter", "Tokens evicted from the device."),
    MetricSpec("sglang:prefetched_tokens_total", "counter", "Tokens read from storage."),
    MetricSpec("sglang:backuped_tokens_total", "counter", "Tokens written to storage."),
    MetricSpec(
        "sglang:storage_prefetch_hit_tokens_total",
        "counter",
        "Tokens that look-ups found in storage.",
    ),
    MetricSpec(
        "sglang:storage_prefetch_unfulfilled_tokens_total",
        "counter",
        "Tokens found in storage and not used, by reason.",
        ("reason",),
    ),
    MetricSpec("sglang:prefetch_bandwidth", "histogram", "Rate of a read from storage, GB/s."),
    MetricSpec("sglang:backup_bandwidth", "histogram", "Rate of a write to storage, GB/s."),
    MetricSpec("sglang:time_to_first_token_seconds", "histogram", "Time to the first token."),
    MetricSpec("sglang:e2e_request_latency_seconds", "histogram", "Time to the end of an answer."),
)
"""Metrics of the engines that the dashboard shows. Tests with real engines compare them."""


def _under_vllm() -> Iterator[MetricSpec]:
    """Yield kvtier's metrics under vLLM, by the names that Prometheus shows."""
    for each in UNDER_VLLM:
        ending = "_total" if each.kind == "counter" else ""
        yield replace(each, name=each.name + ending)


def _all(specs: Iterable[MetricSpec]) -> Iterator[Series]:
    engines = {"kvtier": EngineKind.KVTIER, "vllm": EngineKind.VLLM, "sglang": EngineKind.SGLANG}
    for spec in specs:
        engine = engines[spec.name.replace(":", "_").partition("_")[0]]
        if spec in NODE_METRICS:
            engine = EngineKind.NODE
        yield Series(spec.name, spec.kind, spec.meaning, spec.labels, engine)


SERIES: Mapping[str, Series] = {
    each.name: each
    for each in _all((*METRICS, *SERVER_METRICS, *NODE_METRICS, *_under_vllm(), *ENGINES_OWN))
}
