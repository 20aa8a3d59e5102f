"""Eviction policies. ``base`` has their interface."""

from __future__ import annotations

from kvtier.index.policies.base import EvictionPolicy
from kvtier.index.policies.lru import LruPolicy
from kvtier.index.policies.native import (
    ArcPolicy,
    LfudaPolicy,
    RunsPolicy,
    S3FifoPolicy,
    SievePolicy,
)

__all__ = [
    "ArcPolicy",
    "EvictionPolicy",
    "LfudaPolicy",
    "LruPolicy",
    "RunsPolicy",
    "S3FifoPolicy",
    "SievePolicy",
]
