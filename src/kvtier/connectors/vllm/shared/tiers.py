"""Tiers of one engine, as its scheduler knows them: of its ranks, or of a node."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from kvtier.cache.block_cache import BlockCache
from kvtier.cache.direct import DirectReads
from kvtier.cache.ladder import LadderOptions
from kvtier.cache.local import LocalBlockCache
from kvtier.cache.transfer.ranks import RankMover
from kvtier.connectors.vllm.shared.names import VllmNames
from kvtier.connectors.vllm.shared.prompt import Shape
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.index import make_key_index
from kvtier.node.client.cache import NodeCache
from kvtier.node.client.channel import NodeClient
from kvtier.tiers import DistantAllocator, Quota, SlotAllocator

PIECE_BYTES = 16 << 20
"""Bytes that a rank reads from its disk, or writes to it, at a time."""


@dataclass(frozen=True, slots=True)
class EngineTiers:
    """Cache of an engine's blocks, and what only an engine with tiers of its own has.

    host: slots in the memory of the ranks; None if they are a node's. direct_reads: from storage
    to the engine's own pages; None if its ranks do not reach the storage.
    """

    cache: BlockCache
    host: DistantAllocator | None = None
    direct_reads: DirectReads | None = None

    @property
    def is_shared(self) -> bool:
        """Whether other engines share the tiers."""
        return self.host is None

    def open(self, num_slots: int) -> None:
        """Note that every rank has opened so many slots."""
        if self.host is not None:
            self.host.open(num_slots)


def rank_tiers(
    mover: RankMover,
    num_slots: Mapping[str, int],
    names: VllmNames,
    shape: Shape,
    bytes_per_day: int = 0,
    lookup_deadline_s: float = 0.0,
    eviction_policy: str = "runs",
) -> EngineTiers:
    """Return tiers in the ranks' own memory and storage, with so many slots in each rank.

    bytes_per_day: most bytes written to a rank's disk per day. lookup_deadline_s: longest wait of a
    request for a store's answer.
    """

    def limit(tier: str, own: int) -> int:
        """Return how many blocks every rank has room for. own: by the first rank's slots."""
        told = mover.num_blocks(tier)
        return own if told is None else min(own, told)

    host = DistantAllocator(num_slots[HOST])
    allocators: dict[str, SlotAllocator] = {HOST: host}
    allocators |= {name: Quota(partial(limit, name, num_slots[name])) for name in mover.storages}
    policies = dict.fromkeys(allocators, eviction_policy)
    index = make_key_index(policies, lambda: names.digest, shape.group_bytes)
    cache = LocalBlockCache(
        index,
        allocators,
        mover,
        LadderOptions(
            shape.bytes_per_block,
            bytes_per_day={DISK: bytes_per_day},
            piece_blocks=max(1, PIECE_BYTES // max(1, shape.bytes_per_block)),
            lookup_patience_s=lookup_deadline_s,
            block_size=shape.block_sizes[0] if index.learns else 0,
            num_shards=shape.num_shards,
        ),
        lambda: names.digest,
        time.monotonic,
        device=DEVICE,
        knows_storage=lambda: mover.is_complete,
    )
    return EngineTiers(cache, host, cache.direct_reads)


def node_tiers(
    client: NodeClient, names: VllmNames, shape: Shape, deadline_s: float
) -> EngineTiers:
    """Return tiers in a node. deadline_s: longest wait for its answers."""
    block_bytes = shape.bytes_per_block * shape.num_shards
    cache = NodeCache(
        client, lambda: names.digest, block_bytes, deadline_s, group_bytes=shape.group_bytes
    )
    return EngineTiers(cache)
