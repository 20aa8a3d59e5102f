"""Memory tier over the blocks of calls, at any address."""

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
    """Memory tier whose slots refer to a caller's blocks for the duration of a call.

    sizes: int64 [num_pieces], bytes of each piece of a block. num_slots: most blocks of all calls
    at a time.
    """

    def __init__(self, sizes: npt.NDArray[np.int64], num_slots: int) -> None:
        num_bytes = int(sizes.sum())
        nowhere = Memory(0, num_bytes * num_slots, "host", None)
        super().__init__(HOST, nowhere, named_layout("block_first", opaque(num_bytes), num_slots))
        self.sizes = sizes
        self._addresses = np.zeros((num_slots, len(sizes)), np.uint64)
        self._unused = SlotPool(num_slots)

    def place(self, blocks: Pieces) -> Sequence[Slot]:
        """Return slots for the blocks of a call, in their order, valid until ``take_back``."""
        assert (blocks.sizes == self.sizes).all(), "blocks of another shape"
        slots = self._unused.allocate(len(blocks))
        assert slots is not None, "more blocks at a time than the memory was made for"
        self._addresses[slots] = blocks.addresses
        return slots

    def take_back(self, slots: Sequence[Slot]) -> None:
        """Free slots at the end of a call."""
        self._unused.free(slots)

    def pieces(self, slots: Sequence[Slot]) -> Pieces:
        return Pieces(self._addresses[slots], self.sizes)


class SpareMemory:
    """Memory for blocks that are read only to measure the duration of a read.

    It takes slots of ``memory`` for ``num_blocks`` blocks until ``close``.
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
        """Free the memory, when no read into it is in flight."""
        self._memory.take_back(self.slots)
        self._pages.close()

    def abandon(self) -> None:
        """Keep the memory for the life of the process, since a read into it does not end."""
        _ABANDONED.append(self._pages)
