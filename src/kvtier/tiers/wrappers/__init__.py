"""Tiers around tiers."""

from __future__ import annotations

from kvtier.tiers.wrappers.sealed import SealedTier, make_sealed
from kvtier.tiers.wrappers.shard import ShardTier
from kvtier.tiers.wrappers.throttled import ThrottledTier

__all__ = ["SealedTier", "ShardTier", "ThrottledTier", "make_sealed"]
