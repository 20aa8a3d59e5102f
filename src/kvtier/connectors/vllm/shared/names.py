"""Names of vLLM's blocks outside the process: facts that must agree before two may share a block.

vLLM's keys name a prompt's tokens, its adapter, images and salt, and the KV group. The namespace
names everything else that decides on the bytes of a block. If any of it differs, look-ups miss;
KV is never wrong. For the weights, that is a digest of all their bytes; weights.py finds them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from blake3 import blake3

from kvtier.connectors.common.names import BlockNames as SharedNames
from kvtier.connectors.common.weights import Source
from kvtier.connectors.vllm.shared.reach import WHOLE, GroupReach
from kvtier.core.keys import Namespace


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One KV group.

    group_id: its place among vLLM's. reach: what its layers need of a prompt to go on from a token;
    of interest to the front that decides on groups itself.
    """

    group_id: int
    tokens_per_page: int
    layer_names: tuple[str, ...]
    reach: GroupReach = WHOLE


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine, as one of its processes knows it.

    Args:
        groups: the KV groups that are cached.
        bytes_per_page: of all layers, on one rank.
        pages_per_block: pages of one group that make a block.
        tokens_per_hash: tokens that one of vLLM's block hashes names.
        dtype: of the KV.
        engine_id: vLLM's, distinct for each replica.
        rank: of this process; 0 for the scheduler's.
        num_ranks, tp_size, pp_size, pcp_size, dcp_size: ranks in all, and by kind of parallelism.
        replica: number of this replica under data parallelism; 0 for the first or only one.
        kv_cache_layout: vLLM's name of the order of a page's axes.
        is_replicated: all ranks have the same KV.
        is_canonical: blocks have the layout that vLLM calls canonical.
        any_size: stores have blocks in shards that do not depend on the ranks.
        publishes_events: vLLM wants to hear which blocks are cached.
        model: name of the model, for display.
    """

    groups: tuple[GroupFacts, ...]
    bytes_per_page: int
    pages_per_block: int
    tokens_per_hash: int
    dtype: str
    engine_id: str = ""
    rank: int = 0
    num_ranks: int = 1
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    replica: int = 0
    kv_cache_layout: str | None = None
    is_replicated: bool = False
    is_canonical: bool = False
    any_size: bool = False
    publishes_events: bool = False
    model: str = ""

    @property
    def num_shards(self) -> int:
        """Ranks that each keep a part of every block; one stores for all that have the same."""
        return 1 if self.is_replicated else self.num_ranks


class VllmNames(SharedNames):
    """Names of one engine's blocks. The scheduler's process makes them and sends them to the ranks.

    The arguments are those of ``namespace``.

    Attributes:
        facts: of the engine.
        needs_layout: blocks have no name before ``tell_layout``.
    """

    def __init__(
        self, facts: EngineFacts, bytes_per_block: int, engine: str, salt: str = ""
    ) -> None:
        def digest_of(weights: str) -> bytes:
            facts = self.facts
            return namespace(facts, bytes_per_block, engine, weights, self._traits, salt).digest

        super().__init__(digest_of, salt)
        self.facts = facts
        self._traits = ""
        self.needs_layout = False

    @property
    def digest(self) -> bytes:
        """Return the digest of the namespace; b"" while weights or the layout are unknown."""
        return b"" if self.needs_layout else super().digest

    def tell_layout(self, layout: str) -> None:
        """Set the layout of a page's bytes on the ranks, if vLLM's config does not contain it."""
        self.facts = replace(self.facts, kv_cache_layout=layout)
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
        bytes_per_block: on all ranks that keep a block together, or on one rank.
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
