"""Prefix reuse for models with recurrent layers: their state is stored at few points."""

from __future__ import annotations

from kvtier.snapshots.cache import SNAPSHOT_TOKENS, SnapshotCache
from kvtier.snapshots.lease import SnapshotLease, SnapshotMatch

__all__ = ["SNAPSHOT_TOKENS", "SnapshotCache", "SnapshotLease", "SnapshotMatch"]
