"""Memory of blocks that lie somewhere else in each call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import Memory
from kvtier.layout import named_layout, opaque
from kvtier.tiers import LentMemory, Pieces
from kvtier.tiers.slots import SlotPool
from kvtier.types import HOST, Slot


class CallMemory(LentMemory):
    """Its slots stand for wherever a caller's blocks are, for as long as the call lasts.

    sizes: int64 [num_pieces], bytes of each piece of a block. num_slots: blocks of all calls at a
    time.
    """

    def __init__(self, sizes: npt.NDArray[np.int64], num_slots: int, name: str = HOST) -> None:
        num_bytes = int(sizes.sum())
        nowhere = Memory(0, num_bytes * num_slots, "host", None)
        super().__init__(name, nowhere, named_layout("block_first", opaque(num_bytes), num_slots))
        self._sizes = sizes
        self._addresses = np.zeros((num_slots, len(sizes)), np.uint64)
        self._unused = SlotPool(num_slots)

    def place(self, blocks: Pieces) -> Sequence[Slot]:
        """Slots for the blocks of a call, in their order; they are its own until ``take_back``."""
        assert (blocks.sizes == self._sizes).all(), "blocks of another shape"
        slots = self._unused.allocate(len(blocks))
        assert slots is not None, "more blocks at a time than the memory was made for"
        self._addresses[slots] = blocks.addresses
        return slots

    def take_back(self, slots: Sequence[Slot]) -> None:
        """Take the memory back at the end of a call."""
        self._unused.free(slots)

    def pieces(self, slots: Sequence[Slot]) -> Pieces:
        return Pieces(self._addresses[slots], self._sizes)
