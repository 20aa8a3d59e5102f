"""Open a disk or a store for an engine that serves without it, too."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvtier.devices.base import Finding, Memory
from kvtier.errors import TierError
from kvtier.layout import KVGroup
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.row import make_storage
from kvtier.tiers.storage import Outcome, StorageFacts, StorageTier
from kvtier.types import DISK, BlockKey, BlockName

logger = logging.getLogger(__name__)


class NoStorage(StorageTier):
    """Has no room and finds nothing: stands in for a tier that can't be opened."""

    facts = StorageFacts(finds_at_once=True)
    num_blocks = 0
    num_unfound = 0
    has_unfound = False

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

    Raises ``ConfigError`` for options that can't be used, and for a slab that somebody else has; a
    disk that can't be read is left alone.

    memory: that blocks are read into, and written from, for the most part.
    """
    try:
        tier = DiskTier(options, group, memory)
    except TierError as error:
        logger.error("kvtier: the engine serves without the disk: %s", error)
        return NoStorage(DISK, group)
    for finding in tier.findings():
        logger.info("kvtier %s: %s %s", finding.topic, finding.found, finding.note)
    return tier


def open_store(
    location: str, group: KVGroup, capacity_bytes: int, memory: Memory | None = None
) -> StorageTier:
    """A tier by its URL. Raises ``ConfigError`` for one that can't be used.

    memory: as ``open_disk``.
    """
    tier = make_storage(location, group, capacity_bytes, memory)
    for finding in tier.findings():
        logger.info("kvtier %s: %s %s", finding.topic, finding.found, finding.note)
    return tier
