"""Options of reading a trace."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.recording import Chains

TIME_UNITS = ("auto", "s", "ms")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of reading a trace.

    chains: makes keys where a file has token ids; their ``block_tokens`` counts for logs only.

    block_tokens: of hashed blocks; 0 takes what the format has. time_unit: of their timestamps:
    "s", "ms", or "auto" for what the format has. coarsen: so many blocks become one.
    sessions, hours, seed, shared_prefix: for files of sessions without a start: how many to take (0
    for all), the hours over which their starts are drawn, and whether sessions with equal lengths
    of tools and system prompt share these.
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
