"""Blocks of prompts and requests, as vLLM cuts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext


GROUP_BYTES = 4
"""At the end of vLLM's keys: of which KV group a block is. Those that end at the same token of a
prompt have the same hash in front."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Block sizes of an engine.

    block_sizes: tokens in a block, of each KV group. bytes_per_block: of the largest one, on one
    rank. num_shards: ranks that each keep a part of every block.
    """

    block_sizes: tuple[int, ...]
    bytes_per_block: int
    num_shards: int = 1

    @property
    def has_one_group(self) -> bool:
        return len(self.block_sizes) == 1

    @property
    def is_cut_alike(self) -> bool:
        """Whether the blocks of all groups end at the same tokens.

        Then they stand and fall together. Otherwise a group may keep a block here and there, and
        its prompts have gaps that no policy knows of.
        """
        return len(set(self.block_sizes)) == 1


def depth(end: int, block_size: int) -> int:
    """Position in its prompt, in blocks, of the block that ends at a token; 0 for the first one."""
    return max(0, end // block_size - 1)


def blocks_of(context: ReqContext) -> list[OffloadKey]:
    """All blocks of a request, its prompt's start first; those as well that vLLM's own pool had.

    vLLM has no other way to ask for them.
    """
    ends: dict[OffloadKey, int] = context._offload_key_positions
    return sorted(ends, key=ends.__getitem__)


def path_of(context: ReqContext, block_size: int) -> list[OffloadKey]:
    """``blocks_of``, but for the ends of prompts that are no whole blocks.

    VLLM tries many of these where it looks for the state of recurrent layers.
    """
    ends: dict[OffloadKey, int] = context._offload_key_positions
    return [key for key in blocks_of(context) if ends[key] % block_size == 0]


def blocks_after(context: ReqContext, num_tokens: int) -> list[OffloadKey]:
    """The blocks of a request that end behind its first tokens: group by group, in prompt order."""
    ends: dict[OffloadKey, int] = context._offload_key_positions
    return [key for key, end in ends.items() if end > num_tokens]
