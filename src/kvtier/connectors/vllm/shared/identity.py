"""Facts that must agree before two vLLM processes may share a block of KV.

vLLM's keys name a prompt's tokens, its adapter, images and salt, and the KV group. What else there
is that decides on the bytes of a block is named here: whatever differs is a miss, never wrong KV.
Of the weights that is all their bytes; weights.py says where these are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from blake3 import blake3

from kvtier.connectors.vllm.shared.engine_facts import EngineFacts
from kvtier.core.keys import Namespace


def namespace(
    facts: EngineFacts,
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
        dtype=facts.dtype,
        layout=_layout(facts, bytes_per_block),
        block_size=facts.tokens_per_hash,
        salt=salt,
    )


def _layout(facts: EngineFacts, bytes_per_block: int) -> str:
    """Return a digest of how a block's bytes are arranged, as far as the namespace says it.

    If stores do not depend on the ranks, nor does it: shards and folders have names of their own.
    """
    if not facts.any_size:
        return rank_layout(facts, bytes_per_block)
    return _digest(
        {
            "blocks_per_chunk": facts.pages_per_block,
            "kv_cache_layout": facts.kv_cache_layout,
            "canonical": facts.is_canonical,
            "groups": [group.tokens_per_page for group in facts.groups],
            "ranks": "any",
        }
    )


def rank_layout(facts: EngineFacts, bytes_per_block: int) -> str:
    """Return a digest of how a block's bytes are arranged over ranks, groups and layers.

    Slabs are found by what the facts are called here, vLLM's words or not.
    """
    named = {
        "row_bytes": bytes_per_block,
        "bytes_per_block": facts.bytes_per_page,
        "blocks_per_chunk": facts.pages_per_block,
        "kv_cache_layout": facts.kv_cache_layout,
        "replicated": facts.is_replicated,
        "canonical": facts.is_canonical,
        "ranks": [facts.num_ranks, facts.tp_size, facts.pp_size, facts.pcp_size, facts.dcp_size],
        "groups": [
            [group.group_id, group.tokens_per_page, list(group.layer_names)]
            for group in facts.groups
        ],
    }
    return _digest(named)


def _digest(named: Mapping[str, object]) -> str:
    return blake3(json.dumps(named, sort_keys=True).encode()).hexdigest()
