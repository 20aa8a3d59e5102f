"""Host staging memory for writes to storage that cannot read the blocks where they are."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from kvtier.core.types import Slot
from kvtier.devices import Device
from kvtier.tiers import HostTier, Pieces
from kvtier.tiers.base import MemoryTier

RING_BYTES = 64 << 20
"""Size of the ring: enough to keep a disk busy, and small compared to device memory. Blocks hold
their device slots until they are written, so this bounds those, too."""


def ring_blocks(bytes_per_block: int) -> int:
    """Return the number of blocks that fit; at least one."""
    return max(1, RING_BYTES // bytes_per_block)


class Ring:
    """Host memory for ``ring_blocks`` blocks of ``pool``, page-locked if the device supports it.

    Thread-safe. Raises ``ConfigError`` if the memory cannot be allocated.
    """

    def __init__(self, pool: MemoryTier, device: Device) -> None:
        group = pool.layout.group
        num_bytes = ring_blocks(group.bytes_per_block) * group.bytes_per_block
        self.tier = HostTier(group, num_bytes, device)
        self._lock = Lock()

    def take(self, num_blocks: int) -> Sequence[Slot] | None:
        """Return slots for ``num_blocks`` blocks; None if too few are free. Never waits."""
        with self._lock:
            return self.tier.allocate(num_blocks)

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Free slots that nothing copies from or to any more."""
        with self._lock:
            self.tier.free(slots)

    def pieces(self, slots: Sequence[Slot]) -> Pieces:
        """Return the pieces of the blocks in ``slots``."""
        return self.tier.pieces(slots)

    @property
    def num_used(self) -> int:
        """Slots in use."""
        with self._lock:
            return self.tier.num_used

    def close(self) -> None:
        """Free the memory."""
        self.tier.close()
