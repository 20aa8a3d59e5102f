"""Settings of the embedded engine, and the resulting facts."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.core.config import (
    BLOCK_SIZE,
    CHUNK_TOKENS,
    AuditConfig,
    CacheConfig,
    check_share,
    parse_size,
    setting,
)
from kvtier.core.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
MODEL = (
    "A built-in model, a local directory in Hugging Face format, or a name of the Hugging Face hub "
    "(OWNER/NAME), which is downloaded."
)
CACHE, SERVER = "Cache", "Server"
"""Parts of the help of ``kvtier serve`` with settings of the engine, besides those of the model."""


@dataclass(frozen=True, slots=True)
class EngineConfig(AuditConfig):
    """Settings of the engine: model, device, and limits."""

    model: str = "kvtier-tiny"
    """See ``MODEL``."""
    device: str = setting("auto", "auto, cpu, cuda, npu:0, ...")
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16.")
    revision: str = setting(
        "", "Branch, tag or commit of a model of the Hugging Face hub.", shown="main"
    )
    block_size: int = setting(BLOCK_SIZE, "Tokens per block.", panel=CACHE)
    chunk_tokens: int = setting(CHUNK_TOKENS, "Tokens per prefill chunk.")
    device_capacity: str | int = setting("256MiB", "Size of the device KV pool.", panel=CACHE)
    max_running: int = setting(64, "Most requests decoded together.")
    max_queue: int = setting(512, "Most queued requests; others get status 429.")
    max_model_tokens: int = setting(
        0, "Most tokens of prompt and answer together; 0 for the model's limit."
    )
    prefix_cache: bool = setting(True, "Reuse KV of earlier prompts.", panel=CACHE)
    follow_loads: bool = True
    """Begin to compute while the prefix is still being loaded, layer by layer, if that delays no
    other request."""
    meet_loads: bool = True
    """Compute a prompt's cached prefix from its front while it is loaded from its end, if that is
    predicted to be faster and nothing else is to be computed."""
    threads: int = setting(0, "Compute threads; 0 for torch's choice.")
    events: str = setting(
        "",
        "ZeroMQ address at which KV events are published for routers: tcp://127.0.0.1:5557. They "
        "contain token ids of prompts, and salts.",
        shown="none",
        panel=SERVER,
    )
    events_replay: str = setting(
        "",
        "ZeroMQ address at which routers request events that they missed, or the present state.",
        shown="none",
        panel=SERVER,
    )
    events_topic: str = setting(
        "", "Topic of the events: kv@HOST:PORT@MODEL for llm-d.", shown="none", panel=SERVER
    )
    cache: CacheConfig = field(default_factory=CacheConfig)
    """The tiers below the device."""

    def __post_init__(self) -> None:
        for name in ("block_size", "chunk_tokens", "max_running", "max_queue"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")
        for name in ("max_model_tokens", "threads"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 0")
        parse_size(self.device_capacity, "device_capacity")
        check_share(self.audit)
        if self.dtype not in ("auto", *DTYPES):
            raise ConfigError(f"dtype: {self.dtype!r} is unknown; use auto, {', '.join(DTYPES)}")
        if self.events_replay and not self.events:
            raise ConfigError(
                f"events_replay: {self.events_replay!r} without events; give an address for both"
            )
        if self.chunk_tokens % self.block_size:
            raise ConfigError(
                f"chunk_tokens: {self.chunk_tokens} is no multiple of block_size={self.block_size};"
                " change one of them"
            )


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of a running engine, with all automatic settings resolved.

    num_device_blocks, bytes_per_block: of blocks with the KV of all layers. A model with windows
    has smaller ones, of some layers each.
    """

    model_name: str
    device: str
    dtype: str
    attention: str
    vocab_size: int
    num_parameters: int
    max_model_tokens: int
    num_device_blocks: int
    block_size: int
    chunk_tokens: int
    bytes_per_block: int
    context_note: str = ""
    """A sentence for requests that are too long, if the limit is not the model's own."""
