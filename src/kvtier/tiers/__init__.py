"""Tiers: where blocks live."""

from __future__ import annotations

from kvtier.tiers.base import MemoryTier, Tier
from kvtier.tiers.device import DeviceTier
from kvtier.tiers.host import HostTier

__all__ = ["DeviceTier", "HostTier", "MemoryTier", "Tier"]
