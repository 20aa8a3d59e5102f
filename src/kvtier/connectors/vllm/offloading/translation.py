"""Translation of vLLM's ``v1/kv_offload`` types into kvtier's: engines, requests, slots, tiers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LoadStoreSpec, ReqContext

import kvtier.connectors.vllm.offloading.positions  # noqa: F401 - of blocks, before vLLM 0.31
from kvtier.connectors.vllm.shared.copies import BlockSlots
from kvtier.connectors.vllm.shared.names import EngineFacts, GroupFacts
from kvtier.connectors.vllm.shared.prompt import RequestBlocks
from kvtier.core.types import DISK, HOST

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource


@dataclass(frozen=True)
class HostSlots(LoadStoreSpec):
    """Places of a copy's blocks, as vLLM carries them from the scheduler's side to a rank."""

    blocks: BlockSlots


def facts_of(config: OffloadingConfig) -> EngineFacts:
    """Return the facts about the engine in an offloading spec's config."""
    parallel = config.parallel
    return EngineFacts(
        groups=tuple(
            GroupFacts(group.group_id, group.tokens_per_block, tuple(group.layer_names))
            for group in config.groups
        ),
        bytes_per_page=config.worker_kv_bytes_per_block,
        pages_per_block=config.cache.blocks_per_chunk,
        tokens_per_hash=config.cache.tokens_per_hash,
        dtype=config.model.dtype,
        engine_id=config.engine_id,
        rank=parallel.rank,
        num_ranks=max(1, parallel.world_size),
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        pcp_size=parallel.pcp_size,
        dcp_size=parallel.dcp_size,
        replica=parallel.data_parallel_index,
        kv_cache_layout=config.kv_cache_layout,
        is_replicated=config.replicated_layout,
        is_canonical=config.canonical_layout,
        publishes_events=config.enable_kv_cache_events,
        model=config.model.name,
    )


def request_of(context: ReqContext) -> RequestBlocks:
    """Return kvtier's view of a request, made once. vLLM adds blocks to it as it finds them."""
    found: RequestBlocks | None = context.get_state(RequestBlocks)
    if found is None:
        ends: dict[Any, int] = context._offload_key_positions
        envelope = getattr(context, "kv_hints", None)  # from vLLM 0.32
        found = RequestBlocks(context.req_id, ends, context.kv_transfer_params, envelope)
        context.set_state(found)
    return found


@cache
def source_of(tier: str) -> CacheHitSource:
    """Under which name hits are counted, from vLLM 0.32. It has none for stores."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    names = {HOST: CacheHitSource.HOST, DISK: CacheHitSource.DISK}
    return names.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
