"""Eviction policies. ``base`` has the interface of policies in Python, ``replayed`` all names."""

from __future__ import annotations

from kvtier.index.policies.base import EvictionPolicy
from kvtier.index.policies.lru import LruPolicy

__all__ = ["EvictionPolicy", "LruPolicy"]
