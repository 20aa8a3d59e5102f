"""Memory for blocks that are read to see how long that takes, and not to be used."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from kvtier.connectors.common.call_memory import CallMemory
from kvtier.tiers import Pieces, pages
from kvtier.types import Slot

_ABANDONED: list[mmap.mmap] = []


class SpareMemory:
    """Slots of ``memory`` for ``num_blocks`` blocks, in pages of their own until ``close``."""

    def __init__(self, memory: CallMemory, sizes: Sequence[int], num_blocks: int) -> None:
        self._memory = memory
        num_bytes = sum(sizes)
        self._pages = pages.anonymous(num_blocks * num_bytes)
        first = np.frombuffer(self._pages, np.uint8).ctypes.data
        begins = first + num_bytes * np.arange(num_blocks)[:, None]
        within = np.cumsum((0, *sizes[:-1]))
        pieces = Pieces((begins + within).astype(np.uint64), np.array(sizes, np.int64))
        self.slots: Sequence[Slot] = memory.place(pieces)

    def close(self) -> None:
        """Nothing is read into it any more."""
        self._memory.take_back(self.slots)
        self._pages.close()

    def abandon(self) -> None:
        """A read into it does not end: it is nobody else's for as long as the process lives."""
        _ABANDONED.append(self._pages)
