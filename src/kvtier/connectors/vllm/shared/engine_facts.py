"""Facts about a vLLM engine that both connectors derive from vLLM's configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One KV group. group_id: its place among vLLM's."""

    group_id: int
    tokens_per_page: int
    layer_names: tuple[str, ...]


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

    @property
    def num_shards(self) -> int:
        """Ranks that each keep a part of every block; one stores for all that have the same."""
        return 1 if self.is_replicated else self.num_ranks
