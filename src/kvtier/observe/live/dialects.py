"""Names of each engine's metrics that are not kvtier's own: prompts, requests, times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.observe import specs
from kvtier.observe.live.reading import Reading


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

    @property
    def activity(self) -> tuple[str, ...]:
        """Counters of which one grows with every request."""
        return self.asked, self.requests, f"{self.ttft}_count"


KVTIER = Dialect(
    "kvtier",
    specs.SERVER_REQUESTS.name,
    specs.PROMPT_BLOCKS.name,
    specs.HIT_BLOCKS.name,
    "tier",
    specs.SERVER_PROMPT_TOKENS.name,
    specs.SERVER_RUNNING.name,
    specs.SERVER_WAITING.name,
    specs.SERVER_TTFT_SECONDS.name,
    f"{specs.SERVER_E2E_SECONDS.name}_count",
)
VLLM = Dialect(
    "vLLM",
    specs.VLLM_PROMPT_TOKENS.name,
    specs.VLLM_PROMPT_TOKENS.name,
    specs.VLLM_PROMPT_TOKENS_CACHED_BY_SOURCE.name,
    "source",
    specs.VLLM_PROMPT_TOKENS.name,
    specs.VLLM_NUM_REQUESTS_RUNNING.name,
    specs.VLLM_NUM_REQUESTS_WAITING.name,
    specs.VLLM_TIME_TO_FIRST_TOKEN_SECONDS.name,
    specs.VLLM_REQUEST_SUCCESS.name,
    specs.VLLM_KV_CACHE_USAGE_PERC.name,
    {"device": "device", "host": "host", "disk": "disk", "external_unspecified": "stores"},
    {
        ("host", "device"): specs.VLLM_KV_OFFLOAD_LOAD_BYTES.name,
        ("device", "host"): specs.VLLM_KV_OFFLOAD_STORE_BYTES.name,
    },
)
SGLANG = Dialect(
    "SGLang",
    specs.SGLANG_NUM_RUNNING_REQS.name,
    specs.SGLANG_PROMPT_TOKENS.name,
    specs.SGLANG_CACHED_TOKENS.name,
    "cache_source",
    specs.SGLANG_PROMPT_TOKENS.name,
    specs.SGLANG_NUM_RUNNING_REQS.name,
    specs.SGLANG_NUM_QUEUE_REQS.name,
    specs.SGLANG_TIME_TO_FIRST_TOKEN_SECONDS.name,
    specs.SGLANG_NUM_REQUESTS.name,
    specs.SGLANG_TOKEN_USAGE.name,
    {"device": "device", "host": "host", "storage": "storage"},
)
NODE = Dialect(
    "kvtier node",
    specs.NODE_INFO.name,
    specs.NODE_LOOKUP_BLOCKS.name,
    specs.NODE_LOOKUP_BLOCKS.name,
    "place",
    prompt_tokens="",
    running="",
    waiting=specs.NODE_WAITING_REQUESTS.name,
    ttft="",
    requests=f"{specs.NODE_LOOKUP_SECONDS.name}_count",
    sources={"memory": "host", "storage": "storage"},
)


def dialect_of(reading: Reading) -> Dialect | None:
    """Return the dialect of the engine whose metrics these are; None if unknown."""
    known = (each for each in (KVTIER, VLLM, SGLANG, NODE) if reading.has(each.sign))
    return next(known, None)
