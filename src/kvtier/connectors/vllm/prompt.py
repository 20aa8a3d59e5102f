"""A request's chunks, as vLLM has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext


def depth(end: int, tokens_per_chunk: int) -> int:
    """Position in its prompt, in chunks, of the chunk that ends at a token; 0 for the first one."""
    return max(0, end // tokens_per_chunk - 1)


def chunks_of(context: ReqContext) -> list[OffloadKey]:
    """All chunks of a request, its prompt's start first; those as well that vLLM's own pool had.
    vLLM has no other way to ask for them."""
    ends: dict[OffloadKey, int] = context._offload_key_positions
    return sorted(ends, key=ends.__getitem__)
