"""Tiers around tiers."""

from __future__ import annotations

from kvtier.tiers.wrappers.coded import CodedTier
from kvtier.tiers.wrappers.shard import Shards, ShardTier
from kvtier.tiers.wrappers.throttled import ThrottledTier

__all__ = ["CodedTier", "ShardTier", "Shards", "ThrottledTier"]
