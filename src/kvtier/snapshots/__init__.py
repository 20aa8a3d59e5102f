"""Caches for models that need a state at a cut, beside the KV of its prefix.

It is a snapshot of recurrent layers, or the KV that layers with a window reach.
"""

from __future__ import annotations

from kvtier.snapshots.cache import SNAPSHOT_TOKENS, SnapshotCache
from kvtier.snapshots.lease import SnapshotLease, SnapshotMatch, WindowLease
from kvtier.snapshots.windows import WindowCache, WindowShape

__all__ = [
    "SNAPSHOT_TOKENS",
    "SnapshotCache",
    "SnapshotLease",
    "SnapshotMatch",
    "WindowCache",
    "WindowLease",
    "WindowShape",
]
