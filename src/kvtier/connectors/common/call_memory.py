"""Memory of the blocks of a call, wherever the caller has them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import Memory
from kvtier.layout import named_layout, opaque
from kvtier.tiers import LentMemory, Pieces, pages
from kvtier.tiers.slots import SlotPool
from kvtier.types import HOST, Slot

_ABANDONED: list[mmap.mmap] = []


class CallMemory(LentMemory):
    """Its slots stand for wherever a caller's blocks are, for as long as the call lasts.

    sizes: int64 [num_pieces], bytes of each piece of a block. num_slots: blocks of all calls at a
    time.
    """

    def __init__(self, sizes: npt.NDArray[np.int64], num_slots: int) -> None:
        num_bytes = int(sizes.sum())
        nowhere = Memory(0, num_bytes * num_slots, "host", None)
        super().__init__(HOST, nowhere, named_layout("block_first", opaque(num_bytes), num_slots))
        self.sizes = sizes
        self._addresses = np.zeros((num_slots, len(sizes)), np.uint64)
        self._unused = SlotPool(num_slots)

    def place(self, blocks: Pieces) -> Sequence[Slot]:
        """Slots for the blocks of a call, in their order; they are its own until ``take_back``."""
        assert (blocks.sizes == self.sizes).all(), "blocks of another shape"
        slots = self._unused.allocate(len(blocks))
        assert slots is not None, "more blocks at a time than the memory was made for"
        self._addresses[slots] = blocks.addresses
        return slots

    def take_back(self, slots: Sequence[Slot]) -> None:
        """Take the memory back at the end of a call."""
        self._unused.free(slots)

    def pieces(self, slots: Sequence[Slot]) -> Pieces:
        return Pieces(self._addresses[slots], self.sizes)


class SpareMemory:
    """Memory for blocks that are read only to measure how long that takes.

    Slots of ``memory`` for ``num_blocks`` blocks, in pages of their own until ``close``.
    """

    def __init__(self, memory: CallMemory, num_blocks: int) -> None:
        self._memory = memory
        sizes = memory.sizes
        num_bytes = int(sizes.sum())
        self._pages = pages.anonymous(num_blocks * num_bytes)
        first = np.frombuffer(self._pages, np.uint8).ctypes.data
        begins = first + num_bytes * np.arange(num_blocks)[:, None]
        pieces = Pieces((begins + np.cumsum(sizes) - sizes).astype(np.uint64), sizes)
        self.slots: Sequence[Slot] = memory.place(pieces)

    def close(self) -> None:
        """Nothing is read into it any more."""
        self._memory.take_back(self.slots)
        self._pages.close()

    def abandon(self) -> None:
        """A read into it does not end: it is nobody else's for as long as the process lives."""
        _ABANDONED.append(self._pages)
