"""Memory tier over blocks of another owner, which lends them one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.core.types import Slot
from kvtier.devices.base import Memory
from kvtier.layout import named_layout, opaque
from kvtier.tiers.base import MemoryTier
from kvtier.tiers.pieces import Pieces


class LentMemory(MemoryTier):
    """Memory tier whose slots stand for lent blocks, anywhere in memory, until they are freed.

    Only their owner can add blocks, by ``lend``, so ``allocate`` returns none. The memory outlives
    the tier.

    Args:
        name: of the tier.
        sizes: int64 [num_pieces], bytes of each piece of a block.
        num_slots: most blocks that are lent at a time.
    """

    def __init__(self, name: str, sizes: npt.NDArray[np.int64], num_slots: int) -> None:
        num_bytes = int(sizes.sum())
        nowhere = Memory(0, num_bytes * num_slots, "host", None)
        super().__init__(name, nowhere, named_layout("block_first", opaque(num_bytes), num_slots))
        self.sizes = sizes
        self._addresses = np.zeros((num_slots, len(sizes)), np.uint64)

    def lend(self, blocks: Pieces) -> Sequence[Slot]:
        """Return slots for blocks, in their order. The owner does not use them until ``free``."""
        assert (blocks.sizes == self.sizes).all(), "blocks of another shape"
        slots = self._slots.allocate(len(blocks))
        assert slots is not None, "more blocks at a time than the tier was made for"
        self._addresses[slots] = blocks.addresses
        return slots

    def pieces(self, slots: Sequence[Slot]) -> Pieces:
        return Pieces(self._addresses[slots], self.sizes)

    @property
    def num_free(self) -> int:
        return 0

    @property
    def num_used(self) -> int:
        return self.num_slots - self._slots.num_free

    def allocate(self, num_slots: int) -> Sequence[Slot] | None:
        return None if num_slots else []

    def longest_run(self) -> int:
        return 0

    def close(self) -> None:
        """Do nothing: the memory belongs to its owner."""
