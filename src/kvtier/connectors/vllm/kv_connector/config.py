"""Facts about an engine, from vLLM's configuration alone."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from kvtier.connectors.vllm.shared.names import EngineFacts, GroupFacts
from kvtier.connectors.vllm.shared.pages import layer_specs
from kvtier.connectors.vllm.shared.reach import GroupReach, Kind, reach_of
from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.core.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def facts_of(config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineFacts:
    """Return the facts of an engine. Raises ``ConfigError`` for one that can't be served."""
    parallel, cache = config.parallel_config, config.cache_config
    dcp = parallel.decode_context_parallel_size
    pcp = getattr(parallel, "prefill_context_parallel_size", 1)
    groups = tuple(
        GroupFacts(
            at, group.kv_cache_spec.block_size * dcp * pcp, tuple(group.layer_names), _reach(group)
        )
        for at, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    tokens_per_hash = _tokens_per_hash(config, kv_cache_config, dcp * pcp)
    if any(group.tokens_per_page % tokens_per_hash for group in groups):
        raise ConfigError(
            "KvtierConnector needs vLLM's --enable-prefix-caching for this model: without it, vLLM "
            f"has blocks of {[group.tokens_per_page for group in groups]} tokens"
        )
    dtype = config.model_config.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    events = config.kv_events_config
    return EngineFacts(
        groups=groups,
        bytes_per_page=_bytes_per_page(kv_cache_config),
        pages_per_block=_pages_per_block(
            config.kv_transfer_config.kv_connector_extra_config,
            {group.tokens_per_page for group in groups},
        ),
        tokens_per_hash=tokens_per_hash,
        dtype=str(dtype).removeprefix("torch."),
        engine_id=str(config.kv_transfer_config.engine_id),
        rank=parallel.rank,
        num_ranks=max(1, parallel.world_size),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        pcp_size=pcp,
        dcp_size=dcp,
        replica=getattr(parallel, "data_parallel_index", parallel.data_parallel_rank),
        is_replicated=_is_replicated(config, kv_cache_config),
        publishes_events=events is not None and bool(events.enable_kv_cache_events),
        model=config.model_config.model,
    )


def _reach(group: Any) -> GroupReach:
    """Return the reach of a KV group. Raises ``ConfigError`` for layers that are not served."""
    reaches = [reach_of(spec) for spec in layer_specs(group).values()]
    whole = [reach for reach in reaches if reach.kind is Kind.WHOLE]
    return (whole or sorted(reaches, key=lambda reach: -reach.num_tokens))[0]


def _bytes_per_page(kv_cache_config: KVCacheConfig) -> int:
    """Return the bytes of a page of all layers.

    The sizes come from the KV tensors: vLLM's scheduler has one spec for layers that may differ.
    """
    tensors = kv_cache_config.kv_cache_tensors
    # A tensor with a block stride gives the size of the allocation that all tensors share.
    is_one = any(getattr(tensor, "block_stride", 0) for tensor in tensors)
    sizes = [int(each.size) for each in (tensors[:1] if is_one else tensors)]
    return sum(sizes) // int(kv_cache_config.num_blocks)


def _is_replicated(config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Return whether all ranks compute the same KV, and can map the same host memory.

    Tensor parallelism does not divide the latent KV of MLA. vLLM gives the number of equal ranks
    from 0.31 on (``kv_tp_replicas``); before, only models whose layers are all MLA count.
    """
    parallel = config.parallel_config
    num_ranks = parallel.tensor_parallel_size
    one_machine = parallel.distributed_executor_backend == "mp" and parallel.nnodes_within_dp == 1
    if not (config.model_config.use_mla and one_machine and 1 < num_ranks == parallel.world_size):
        return False
    if parallel.decode_context_parallel_size > 1:
        return False
    replicas = getattr(kv_cache_config, "kv_tp_replicas", None)
    if replicas is not None:
        return bool(replicas == num_ranks)
    if len(kv_cache_config.kv_cache_groups) > 1:
        return False
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    # If some layers are of another kind, the sizes of the tensors differ from the spec's.
    num_bytes = len(group.layer_names) * spec.page_size_bytes
    is_mla = type(spec).__name__ == "MLAAttentionSpec"
    return is_mla and num_bytes == _bytes_per_page(kv_cache_config)


def _tokens_per_hash(
    config: VllmConfig, kv_cache_config: KVCacheConfig, context_parallel: int
) -> int:
    """Return the tokens that one of ``Request.block_hashes`` names."""
    from vllm.v1.core import kv_cache_utils

    resolve = getattr(kv_cache_utils, "resolve_kv_cache_block_sizes", None)
    if resolve is None:  # before 0.20 it is the scheduler's block size
        return int(config.cache_config.block_size) * context_parallel
    return int(resolve(kv_cache_config, config)[1])


def _pages_per_block(extra: Mapping[str, object], page_sizes: Collection[int]) -> int:
    """Read ``blocks_per_chunk`` or ``block_size``, as vLLM's OffloadingConnector has them.

    page_sizes: tokens in a page, of each KV group.
    """
    num_pages, num_tokens = extra.get("blocks_per_chunk"), extra.get("block_size")
    if num_pages is not None and num_tokens is not None:
        raise VllmSettings.wrong("block_size and blocks_per_chunk say the same; give one of them")
    tokens_per_page = max(page_sizes)
    try:
        if num_tokens is None:
            found, rest = int(str(num_pages or 1)), 0
        else:
            found, rest = divmod(int(str(num_tokens)), tokens_per_page)
    except ValueError:
        found, rest = 0, 0
    if num_tokens is not None and len(page_sizes) > 1:
        raise VllmSettings.wrong(
            f"block_size: this model's KV groups have blocks of {sorted(page_sizes)} tokens; give "
            "blocks_per_chunk"
        )
    if found < 1 or rest:
        raise VllmSettings.wrong(
            f"block_size has to be a multiple of {tokens_per_page} tokens, and blocks_per_chunk at "
            f"least 1; they are {num_tokens!r} and {num_pages!r}"
        )
    return found


def keep_block_hashes(config: VllmConfig) -> None:
    """Make vLLM hash a prompt to the same keys in every process, as vLLM 0.30 does by itself.

    Older versions seed the first hash at random unless ``PYTHONHASHSEED`` is set. They read it
    after they have made the connector. The seed stays random for hash algorithms that are not
    collision resistant.
    """
    from vllm.v1.core import kv_cache_utils

    if hasattr(kv_cache_utils, "resolve_none_hash_seed"):
        return
    if config.cache_config.prefix_caching_hash_algo in ("sha256", "sha256_cbor"):
        os.environ.setdefault("PYTHONHASHSEED", "0")
