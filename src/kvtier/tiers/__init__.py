"""Tiers: where blocks live."""

from __future__ import annotations

from kvtier.tiers.arena import ArenaOptions, HugePages
from kvtier.tiers.base import (
    Addresses,
    LoadResult,
    MemoryTier,
    ScrubReport,
    StorageTier,
    Tier,
)
from kvtier.tiers.device import DeviceTier
from kvtier.tiers.host import HostTier

__all__ = [
    "Addresses",
    "ArenaOptions",
    "DeviceTier",
    "HostTier",
    "HugePages",
    "LoadResult",
    "MemoryTier",
    "ScrubReport",
    "StorageTier",
    "Tier",
]
