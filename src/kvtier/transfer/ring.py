"""Host memory that blocks pass through on their way to storage that can't take them as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from kvtier.devices import Device
from kvtier.tiers import HostTier, Pieces
from kvtier.tiers.base import MemoryTier
from kvtier.types import Slot

RING_BYTES = 64 << 20
"""On its way to storage at a time: enough to keep a disk busy, and little beside what a device has.
Blocks hold their slots on the device until they are written, so this bounds that, too."""


def ring_blocks(bytes_per_block: int) -> int:
    """Return the number of blocks that fit; at least one."""
    return max(1, RING_BYTES // bytes_per_block)


class Ring:
    """Room for ``ring_blocks`` of the blocks of ``pool``, page-locked where the device can do that.

    Any thread may use it. Raises ``ConfigError`` where there is no memory for it.
    """

    def __init__(self, pool: MemoryTier, device: Device) -> None:
        group = pool.layout.group
        num_bytes = ring_blocks(group.bytes_per_block) * group.bytes_per_block
        self.tier = HostTier(group, num_bytes, device)
        self._lock = Lock()

    def take(self, num_blocks: int) -> Sequence[Slot] | None:
        """Slots for so many blocks; None where others have them. Never waits."""
        with self._lock:
            return self.tier.allocate(num_blocks)

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Nothing copies from or to them any more."""
        with self._lock:
            self.tier.free(slots)

    def pieces(self, slots: Sequence[Slot]) -> Pieces:
        """Return the pieces of the blocks in ``slots``."""
        return self.tier.pieces(slots)

    @property
    def num_used(self) -> int:
        """Slots that are taken."""
        with self._lock:
            return self.tier.num_used

    def close(self) -> None:
        """Give the memory back."""
        self.tier.close()
