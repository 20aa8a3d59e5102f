"""Opening a disk for an engine that serves without it, too."""

from __future__ import annotations

import logging

from kvtier.devices.base import Memory
from kvtier.errors import TierError
from kvtier.layout import KVGroup
from kvtier.tiers import StorageTier
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.none import NoStorage
from kvtier.tiers.row import make_storage
from kvtier.types import DISK

logger = logging.getLogger(__name__)


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
