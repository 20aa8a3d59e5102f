"""How prompts are cut into blocks, and a request's blocks, as vLLM has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext


@dataclass(frozen=True, slots=True)
class Shape:
    """How prompts are cut. block_sizes: tokens in a block, of each KV group. bytes_per_block: of
    the largest one, on one rank."""

    block_sizes: tuple[int, ...]
    bytes_per_block: int

    @property
    def has_one_group(self) -> bool:
        return len(self.block_sizes) == 1


def depth(end: int, block_size: int) -> int:
    """Position in its prompt, in blocks, of the block that ends at a token; 0 for the first one."""
    return max(0, end // block_size - 1)


def blocks_of(context: ReqContext) -> list[OffloadKey]:
    """All blocks of a request, its prompt's start first; those as well that vLLM's own pool had.
    vLLM has no other way to ask for them."""
    ends: dict[OffloadKey, int] = context._offload_key_positions
    return sorted(ends, key=ends.__getitem__)


def blocks_after(context: ReqContext, num_tokens: int) -> list[OffloadKey]:
    """The blocks of a request that end behind its first tokens: group by group, in prompt order."""
    ends: dict[OffloadKey, int] = context._offload_key_positions
    return [key for key, end in ends.items() if end > num_tokens]
