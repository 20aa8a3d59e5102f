"""The device tier: the engine's own KV pool, seen as slots."""

from __future__ import annotations

from kvtier.devices.base import Memory
from kvtier.errors import LayoutError
from kvtier.layout import Layout
from kvtier.tiers.base import MemoryTier
from kvtier.types import DEVICE


class DeviceTier(MemoryTier):
    """Slots in the pool that attention reads. The engine owns the memory.

    memory: at least ``layout.nbytes`` bytes, alive as long as the tier.
    """

    def __init__(self, memory: Memory, layout: Layout) -> None:
        if memory.nbytes < layout.nbytes:
            raise LayoutError(
                f"the device pool has {memory.nbytes} bytes, its layout needs {layout.nbytes}"
            )
        super().__init__(DEVICE, memory, layout)

    def close(self) -> None:
        """Nothing to give back: the engine owns the pool."""
