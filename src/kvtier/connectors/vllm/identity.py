"""Facts that must agree before two vLLM processes may share a block of KV.

vLLM's keys name a prompt's tokens, its adapter, images and salt, and the KV group. What else there
is that decides on the bytes of a block is named here: whatever differs is a miss, never wrong KV.
Of the weights that is all their bytes; weights.py says where these are.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from blake3 import blake3

from kvtier.keys import Namespace

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig


def namespace(
    config: OffloadingConfig,
    bytes_per_block: int,
    engine: str,
    weights: str,
    traits: str = "",
    salt: str = "",
) -> Namespace:
    """The namespace of an engine's blocks.

    bytes_per_block: of all ranks that keep a block together. engine: name and version
    of what computes the KV. weights: digest of the model's files, which says all of its name.
    traits: what else the caller knows of how the model is computed. salt: separates tenants, or
    what nobody here knows of.
    """
    return Namespace(
        model=weights,
        revision=f"{engine} {traits}",
        dtype=config.model.dtype,
        layout=_layout(config, bytes_per_block),
        block_size=config.cache.tokens_per_hash,
        salt=salt,
    )


def _layout(config: OffloadingConfig, bytes_per_block: int) -> str:
    """Names how a block's bytes are arranged, over ranks, groups and layers.

    Slabs are found by what the facts are called here, vLLM's words or not.
    """
    parallel = config.parallel
    facts = {
        "row_bytes": bytes_per_block,
        "bytes_per_block": config.worker_kv_bytes_per_block,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "kv_cache_layout": config.kv_cache_layout,
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
        "ranks": [
            parallel.world_size,
            parallel.tp_size,
            parallel.pp_size,
            parallel.pcp_size,
            parallel.dcp_size,
        ],
        "groups": [
            [group.group_id, group.tokens_per_block, list(group.layer_names)]
            for group in config.groups
        ],
    }
    return blake3(json.dumps(facts, sort_keys=True).encode()).hexdigest()
