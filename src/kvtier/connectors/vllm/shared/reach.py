"""Reach of a KV group's layers: how much of a prompt they need to go on from one of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvtier.core.errors import ConfigError

WHOLE_PROMPTS = ("FullAttentionSpec", "MLAAttentionSpec")
"""Names of KV cache specs whose layers, and subclasses' layers, keep KV of the whole prompt."""
UNSERVED = ("RSWASpec",)
"""Subclasses of these that vLLM frees parts of while a request runs."""


class Kind(Enum):
    """Kind of a KV group's layers."""

    WHOLE = "whole prompt"
    WINDOW = "last tokens"
    CHUNK = "tokens since the last multiple of so many"
    STATE = "state behind the last token"


@dataclass(frozen=True, slots=True)
class GroupReach:
    """Tokens in front of a boundary that the layers of a KV group need behind it.

    num_tokens: of a window or a chunk.
    """

    kind: Kind = Kind.WHOLE
    num_tokens: int = 0

    def first_needed(self, end: int) -> int:
        """Return the first token needed to go on from ``end``, as vLLM's allocator counts."""
        match self.kind:
            case Kind.WHOLE:
                return 0
            case Kind.WINDOW:
                return max(0, end - self.num_tokens + 1)
            case Kind.CHUNK:
                return end // self.num_tokens * self.num_tokens
            case Kind.STATE:
                return max(0, end - 1)


WHOLE = GroupReach()


def window_of(spec: Any) -> int:
    """Return the tokens of a layer's window by vLLM's KV cache spec; 0 for a layer without one."""
    if not any(kind.__name__ == "SlidingWindowSpec" for kind in type(spec).__mro__):
        return 0
    # vLLM keeps some more tokens behind speculative ones, from 0.31 on.
    return int(spec.sliding_window) + getattr(spec, "extra_retained_tokens", 0)


def reach_of(spec: Any) -> GroupReach:
    """Return the reach of a layer by vLLM's KV cache spec.

    Raises ``ConfigError`` for a kind of layer that can't be served.
    """
    names = {kind.__name__ for kind in type(spec).__mro__}
    if not names.isdisjoint(WHOLE_PROMPTS) and names.isdisjoint(UNSERVED):
        return WHOLE
    if num_tokens := window_of(spec):
        return GroupReach(Kind.WINDOW, num_tokens)
    if "ChunkedLocalAttentionSpec" in names:
        return GroupReach(Kind.CHUNK, int(spec.attention_chunk_size))
    if "MambaSpec" in names:
        # vLLM keeps the states behind all blocks, like a window's, or moves one that it overwrites.
        is_kept = getattr(spec, "mamba_cache_mode", "") == "all"
        return GroupReach(Kind.WINDOW, 2) if is_kept else GroupReach(Kind.STATE)
    raise ConfigError(
        f"KvtierConnector does not serve layers of {type(spec).__name__}: use OffloadingConnector "
        "with spec_name kvtier, where this vLLM has what it needs"
    )
