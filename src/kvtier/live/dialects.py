"""Names of each engine's metrics that are not kvtier's own: prompts, requests, times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.live.reading import Reading


@dataclass(frozen=True, slots=True)
class Dialect:
    """Names of one engine's metrics.

    Attributes:
        engine: the engine's name, for display.
        sign: metric by which the engine is recognized.
        asked: tokens or blocks of prompts.
        given: tokens or blocks of prompts that were not computed, with label ``source``.
        source: label of ``given`` that names the tier.
        prompt_tokens, running, waiting, ttft, requests: further metrics.
        device: share of the engine's own memory in use.
        sources: tiers by the values of ``source``; other values are ignored.
        flows: bytes that the engine itself moves, by (source, destination).
    """

    engine: str
    sign: str
    asked: str
    given: str
    source: str
    prompt_tokens: str
    running: str
    waiting: str
    ttft: str
    requests: str
    device: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    flows: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def name_of(self, source: str) -> str | None:
        """Return the tier of a value of ``source``; None if it is ignored."""
        return self.sources.get(source) if self.sources else source


KVTIER = Dialect(
    "kvtier",
    "kvtier_server_requests_total",
    "kvtier_prompt_blocks_total",
    "kvtier_hit_blocks_total",
    "tier",
    "kvtier_server_prompt_tokens_total",
    "kvtier_server_running",
    "kvtier_server_waiting",
    "kvtier_server_ttft_seconds",
    "kvtier_server_e2e_seconds_count",
)
VLLM = Dialect(
    "vLLM",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_by_source_total",
    "source",
    "vllm:prompt_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds",
    "vllm:request_success_total",
    "vllm:kv_cache_usage_perc",
    {"device": "device", "host": "host", "disk": "disk", "external_unspecified": "stores"},
    {
        ("host", "device"): "vllm:kv_offload_load_bytes_total",
        ("device", "host"): "vllm:kv_offload_store_bytes_total",
    },
)
SGLANG = Dialect(
    "SGLang",
    "sglang:num_running_reqs",
    "sglang:prompt_tokens_total",
    "sglang:cached_tokens_total",
    "cache_source",
    "sglang:prompt_tokens_total",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:time_to_first_token_seconds",
    "sglang:num_requests_total",
    "sglang:token_usage",
    {"device": "device", "host": "host", "storage": "storage"},
)
NODE = Dialect(
    "kvtier node",
    "kvtier_node_info",
    "kvtier_node_lookup_blocks_total",
    "kvtier_node_lookup_blocks_total",
    "place",
    prompt_tokens="",
    running="",
    waiting="kvtier_node_waiting_requests",
    ttft="",
    requests="kvtier_node_lookup_seconds_count",
    sources={"memory": "host", "storage": "storage"},
)


def dialect_of(reading: Reading) -> Dialect | None:
    """Return the dialect of the engine whose metrics these are; None if unknown."""
    known = (each for each in (KVTIER, VLLM, SGLANG, NODE) if reading.has(each.sign))
    return next(known, None)
