"""Memory tier over memory of another owner, which lends single slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.devices.base import Memory
from kvtier.layout import Layout, named_layout, opaque
from kvtier.tiers.base import MemoryTier
from kvtier.types import Slot


class LentMemory(MemoryTier):
    """Memory tier that may use a slot from ``lend`` until ``free``.

    The memory's owner chooses the slots, so ``allocate`` returns none. The memory outlives the
    tier.
    """

    @classmethod
    def of_rows(cls, name: str, memory: Memory, bytes_per_row: int) -> LentMemory:
        """Return a tier over memory that consists of rows of one block each."""
        num_rows = memory.nbytes // bytes_per_row
        return cls(name, memory, named_layout("block_first", opaque(bytes_per_row), num_rows))

    def __init__(self, name: str, memory: Memory, layout: Layout) -> None:
        super().__init__(name, memory, layout)
        self._is_lent = np.zeros(self.num_slots, bool)

    def lend(self, slots: Sequence[Slot]) -> None:
        """Take over slots. Their owner does not use them until they are freed."""
        assert min(slots, default=0) >= 0, "a slot that is not there"
        assert not self._is_lent[slots].any(), "a slot was lent twice"
        self._is_lent[slots] = True

    @property
    def num_free(self) -> int:
        return 0

    @property
    def num_used(self) -> int:
        return int(self._is_lent.sum())

    def allocate(self, num_slots: int) -> Sequence[Slot] | None:
        return None if num_slots else []

    def free(self, slots: Sequence[Slot]) -> None:
        assert self._is_lent[slots].all(), "a slot was given back that was not lent"
        self._is_lent[slots] = False

    def longest_run(self) -> int:
        return 0

    def close(self) -> None:
        """Do nothing: the memory belongs to its owner."""
