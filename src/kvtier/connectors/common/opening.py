"""Open a disk or a store for an engine that can also serve without it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvtier.connectors.common.settings import StoreSettings
from kvtier.core.errors import TierError
from kvtier.core.types import DISK, BlockKey, BlockName
from kvtier.devices.base import Finding, Memory
from kvtier.layout import KVGroup, opaque
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.row import make_storage
from kvtier.tiers.storage import Outcome, StorageFacts, StorageTier
from kvtier.tiers.wrappers import Shards, ShardTier

logger = logging.getLogger(__name__)


class NoStorage(StorageTier):
    """Empty storage without room, in place of a tier that can't be opened."""

    facts = StorageFacts(finds_at_once=True)
    num_blocks = 0
    num_unindexed = 0
    has_unindexed = False

    def __init__(self, name: str, group: KVGroup) -> None:
        self.name = name
        self.bytes_per_block = group.bytes_per_block

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        return [Outcome.ABSENT] * len(keys)

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        return [Outcome.FAILED] * len(names)

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        return [Outcome.ABSENT] * len(keys)

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        pass

    def findings(self) -> list[Finding]:
        return [Finding(f"{self.name} tier", "none")]

    def close(self) -> None:
        pass


def open_disk(
    options: DiskOptions, group: KVGroup, memory: Memory | None = None
) -> DiskTier | NoStorage:
    """Open the slab, or return an empty storage tier if the disk cannot be read.

    Args:
        options: options of the disk tier.
        group: layout of a block.
        memory: the memory that most blocks are read into and written from.

    Raises:
        ConfigError: options can't be used, or another process has opened the slab.
    """
    try:
        tier = DiskTier(options, group, memory)
    except TierError as error:
        logger.error("kvtier: the engine serves without the disk: %s", error)
        return NoStorage(DISK, group)
    _log(tier)
    return tier


def open_store(
    location: str,
    settings: StoreSettings,
    group: KVGroup,
    capacity_bytes: int,
    memory: Memory | None = None,
    shards: Shards | None = None,
) -> StorageTier:
    """Open a store by its URL. Raises ``ConfigError`` if it can't be used.

    settings: have the codec, the keys, and tenant and name in a node. group: layout of a block.
    memory: see ``open_disk``. shards: that this rank has of a block; None if the store has whole
    blocks.
    """
    of_store = group if shards is None else opaque(shards.bytes_per_shard)
    tier = make_storage(
        location,
        of_store,
        capacity_bytes,
        memory,
        settings.coding,
        settings.node_tenant,
        settings.engine_name,
    )
    _log(tier)
    return tier if shards is None else ShardTier(tier, shards)


def _log(tier: StorageTier) -> None:
    for finding in tier.findings():
        logger.info("kvtier %s: %s %s", finding.topic, finding.found, finding.note)
