"""Settings of the embedded engine, and the resulting facts."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.core.config import BLOCK_SIZE, CHUNK_TOKENS, CacheConfig, parse_size
from kvtier.core.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of the engine: model, device, and limits."""

    model: str = "kvtier-tiny"
    """Name of a built-in model, or a local directory in Hugging Face format."""
    device: str = "auto"
    """"auto", "cpu", or what torch calls an accelerator: "cuda", "npu:0"."""
    dtype: str = "auto"
    """"float32", "bfloat16", "float16"; auto is float32 on CPU and the model's own elsewhere."""
    block_size: int = BLOCK_SIZE
    """Tokens per block."""
    chunk_tokens: int = CHUNK_TOKENS
    """Prefill grid: prompts are computed in chunks that end at its multiples."""
    device_capacity: str | int = "256MiB"
    """Size of the device KV pool."""
    max_running: int = 64
    """Requests that are decoded together."""
    max_queue: int = 512
    """Maximum number of waiting requests; further ones are refused."""
    max_model_tokens: int = 0
    """Limit of prompt plus output per request; 0 for the model's own."""
    prefix_cache: bool = True
    """Whether prefixes are reused. If off, every prompt is computed from its start."""
    follow_loads: bool = True
    """Begin to compute while the prefix is still being loaded, layer by layer, if that delays no
    other request."""
    threads: int = 0
    """Number of torch's compute threads; 0 for torch's default."""
    events: str = ""
    """Address to publish block events for routers: "tcp://127.0.0.1:5557"; "" for none."""
    events_replay: str = ""
    """Address for replays of missed events; "" for none."""
    events_topic: str = ""
    """Topic of every batch of events."""
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
