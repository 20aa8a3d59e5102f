"""Names of vLLM's blocks outside the process: facts that must agree before two may share a block.

vLLM's keys name a prompt's tokens, its adapter, images and salt, and the KV group. The namespace
names everything else that decides on the bytes of a block. If any of it differs, look-ups miss;
KV is never wrong. For the weights, that is a digest of all their bytes; weights.py finds them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from blake3 import blake3

from kvtier.connectors.common.names import BlockNames as SharedNames
from kvtier.connectors.common.weights import Source
from kvtier.connectors.vllm.shared.engine_facts import EngineFacts
from kvtier.core.keys import Namespace


class VllmNames(SharedNames):
    """Names of one engine's blocks. The scheduler's process makes them and sends them to the ranks.

    Args:
        facts: the engine's facts.
        bytes_per_block: on all ranks that keep a block together, or on one rank.
        engine: name and version of the engine.
        salt: the user's ``namespace``.

    Attributes:
        needs_layout: blocks have no name before ``tell_layout``.
    """

    def __init__(
        self, facts: EngineFacts, bytes_per_block: int, engine: str, salt: str = ""
    ) -> None:
        def digest_of(weights: str) -> bytes:
            facts = self._facts
            return namespace(facts, bytes_per_block, engine, weights, self._traits, salt).digest

        super().__init__(digest_of, salt)
        self._facts = facts
        self._traits = ""
        self.needs_layout = False

    @property
    def digest(self) -> bytes:
        """Return the digest of the namespace; b"" while weights or the layout are unknown."""
        return b"" if self.needs_layout else super().digest

    def tell_layout(self, layout: str) -> None:
        """Set the layout of a page's bytes on the ranks, if vLLM's config does not contain it."""
        self._facts = replace(self._facts, kv_cache_layout=layout)
        self.needs_layout = False

    def settle(self, sources: Sequence[Source], traits: str = "") -> None:
        """Set the weights' sources. traits: facts about the model that ``EngineFacts`` lacks."""
        self._traits = traits
        super().settle(sources)

    def disown(self, reason: str = "") -> None:
        super().disown(reason or "its cache was reset, as it is when weights are replaced")


def namespace(
    facts: EngineFacts,
    bytes_per_block: int,
    engine: str,
    weights: str,
    traits: str = "",
    salt: str = "",
) -> Namespace:
    """Return the namespace of an engine's blocks.

    Args:
        facts: the engine's facts.
        bytes_per_block: on all ranks that keep a block together.
        engine: name and version of the software that computes the KV.
        weights: digest of the model's files, which replaces the model's name.
        traits: other facts that decide on how the model is computed.
        salt: text that separates tenants, or engines that differ in ways kvtier does not see.
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
    """Return a digest of the arrangement of a block's bytes, for the namespace.

    If stores are shared by engines of any size, it does not depend on the ranks: shards and folders
    have names of their own.
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
