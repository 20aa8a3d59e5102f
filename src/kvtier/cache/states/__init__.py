"""Caches for models that need a state at a cut, beside the KV of its prefix.

It is a snapshot of recurrent layers, or the KV that layers with a window reach.
"""

from __future__ import annotations

from kvtier.cache.states.cache import SNAPSHOT_TOKENS, SnapshotCache
from kvtier.cache.states.lease import SnapshotLease, SnapshotMatch, WindowLease
from kvtier.cache.states.windows import WindowCache, WindowShape

__all__ = [
    "SNAPSHOT_TOKENS",
    "SnapshotCache",
    "SnapshotLease",
    "SnapshotMatch",
    "WindowCache",
    "WindowLease",
    "WindowShape",
]
