"""I/O engines that read and write the slab."""

from __future__ import annotations

from kvtier.tiers.disk.io.base import IoEngine
from kvtier.tiers.disk.io.find import open_direct, open_engine

__all__ = ["IoEngine", "open_direct", "open_engine"]
