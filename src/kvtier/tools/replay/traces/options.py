"""Options of reading a trace."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.core.errors import ConfigError
from kvtier.observe.recording import Chains

TIME_UNITS = ("auto", "s", "ms")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of reading a trace.

    Attributes:
        chains: makes keys for files with token ids. Its ``block_tokens`` applies to logs only.
        block_tokens: tokens per hashed block; 0 for the format's default.
        coarsen: number of blocks to merge into one.
        sessions: agentic sessions to read; 0 for all.
        hours: hours within which their start times are drawn.
        seed: seed of these start times.
        shared_prefix: whether sessions with equal lengths of tools and system prompt share these.
        time_unit: unit of the timestamps of hashed traces: "s", "ms", or "auto" for the format's.
    """

    chains: Chains
    block_tokens: int = 0
    coarsen: int = 1
    sessions: int = 0
    hours: float = 8.0
    seed: int = 11
    shared_prefix: bool = True
    time_unit: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("block_tokens", 0), ("coarsen", 1), ("sessions", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: {getattr(self, name)} is below {least}")
        if self.time_unit not in TIME_UNITS:
            raise ConfigError(f"time_unit: {self.time_unit!r}; use one of {', '.join(TIME_UNITS)}")
        if not 0 < self.hours < 1e5:
            raise ConfigError(f"hours: {self.hours} is no time to draw starts from")
