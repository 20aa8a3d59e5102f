"""Disk tier: a preallocated slab with a journal. Acknowledged blocks survive a crash."""

from __future__ import annotations

from kvtier.core.types import Direct, Durability, IoKind, Verify
from kvtier.tiers.disk.blocks import DiskBlocks
from kvtier.tiers.disk.bounce import goes_direct
from kvtier.tiers.disk.inspect.reader import DiskReader
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.disk.system import DiskSystem
from kvtier.tiers.disk.tier import DiskTier, make_disk

__all__ = [
    "Direct",
    "DiskBlocks",
    "DiskOptions",
    "DiskReader",
    "DiskSystem",
    "DiskTier",
    "Durability",
    "IoKind",
    "Verify",
    "goes_direct",
    "make_disk",
]
