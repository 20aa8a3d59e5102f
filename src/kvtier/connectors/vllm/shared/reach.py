"""Reach of a KV group's layers: how much of a prompt they need to go on from one of its tokens.

``GroupReach`` says what a load has to bring, ``Cuts`` which blocks are worth storing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvtier.connectors.vllm.shared.prompt import GROUP_BYTES, group_bytes
from kvtier.core.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.connectors.vllm.shared.names import EngineFacts

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


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cuts of prompts, up to which their KV can be loaded, and the blocks that a cut needs.

    Attributes:
        every: tokens from one cut to the next.
        reaches: of groups with a window that is shorter than that, by the bytes of the group in a
            key: how far behind a cut the last block that it needs may end, and how far in front of
            that end the others, in tokens.
    """

    every: int = 1
    reaches: Mapping[bytes, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: EngineFacts, groups: Sequence[Any]) -> Cuts:
        """Return the cuts of an engine with these KV groups of vLLM's.

        The rule for windows is that of vLLM's ``SlidingWindowManager.reachable_block_mask``.
        """
        every, windows = 1, list[tuple[bytes, int, int, int]]()
        for group in facts.groups:
            size = group.tokens_per_page * facts.pages_per_block
            vllm_group = groups[group.group_id]
            spec = vllm_group.kv_cache_spec
            spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
            num_tokens = window_of(spec)
            if not num_tokens:
                every = math.lcm(every, size)
                continue
            is_draft = getattr(vllm_group, "is_eagle_group", False)
            num_blocks = -(-(num_tokens - 1) // size) + is_draft
            windows.append((group_bytes(group.group_id), size, is_draft * size, num_blocks * size))
        return cls(
            every,
            {
                group: (shift, reach)
                for group, size, shift, reach in windows
                if every % size == 0 and reach < every
            },
        )

    def need(self, key: bytes, end: int) -> bool:
        """Return whether a cut needs the block that ends at this token."""
        found = self.reaches.get(key[-GROUP_BYTES:])
        if found is None:
            return True
        shift, reach = found
        return (shift - end) % self.every < reach and not 0 < end <= shift  # no cut is at 0
