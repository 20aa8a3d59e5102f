"""Eviction policies, one file each. The seam is in ``base``."""

from __future__ import annotations

from kvtier.index.policies.base import EvictionPolicy
from kvtier.index.policies.learned import RunsPolicy
from kvtier.index.policies.lru import LruPolicy
from kvtier.index.policies.queues import ArcPolicy, LfudaPolicy, S3FifoPolicy, SievePolicy

__all__ = [
    "ArcPolicy",
    "EvictionPolicy",
    "LfudaPolicy",
    "LruPolicy",
    "RunsPolicy",
    "S3FifoPolicy",
    "SievePolicy",
]
