"""Tiers: the memory and storage that hold blocks."""

from __future__ import annotations

from kvtier.tiers.base import DeviceTier, DistantAllocator, MemoryTier, Quota, SlotAllocator
from kvtier.tiers.memory.arena import ArenaOptions, HugePages
from kvtier.tiers.memory.host import HostTier
from kvtier.tiers.memory.lent import LentMemory
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import (
    KeptKeys,
    Outcome,
    ScrubReport,
    StorageFacts,
    StorageSite,
    StorageTier,
)

__all__ = [
    "ArenaOptions",
    "DeviceTier",
    "DistantAllocator",
    "HostTier",
    "HugePages",
    "KeptKeys",
    "LentMemory",
    "MemoryTier",
    "Outcome",
    "Pieces",
    "Quota",
    "ScrubReport",
    "SlotAllocator",
    "StorageFacts",
    "StorageSite",
    "StorageTier",
]
