"""Which block leaves a full tier. One file per policy; the seam is in ``base``."""

from __future__ import annotations

from kvtier.index.policies.base import EvictionPolicy
from kvtier.index.policies.lru import LruPolicy

__all__ = ["EvictionPolicy", "LruPolicy"]
