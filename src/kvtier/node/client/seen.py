"""Blocks that an engine has seen in a node's memory: they are found again without a message."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from kvtier.core.types import HOST, NO_BLOCK
from kvtier.index import make_key_index
from kvtier.index.policies.replayed import LRU
from kvtier.index.selection import Bools, Int64s, as_array

MAX_SEEN = 1 << 19
"""Most blocks. Each takes about 100 bytes."""
MAX_ASKED = 4096
"""Most prompts of which it is known that the node was asked about them."""


class SeenBlocks:
    """Slots in which an engine has seen blocks of one partition, with their generations.

    A slot has another generation once its block has left it. So a block is still there if its
    slot's generation is the same.

    most: most blocks; of more, all are forgotten.
    """

    def __init__(self, most: int = MAX_SEEN) -> None:
        self._most = most
        self._slots, self._generations = np.zeros((2, most), np.int64)
        self.forget()

    def forget(self) -> None:
        """Forget all blocks."""
        # Of this index only the numbering of keys is used: from 0 on, since no block ever leaves.
        self._index = make_key_index({HOST: LRU}, bytes)
        self._asked: OrderedDict[bytes, None] = OrderedDict()

    def is_asked_again(self, first: bytes) -> bool:
        """Whether the node was asked before about blocks from ``first`` on. Notes that it is now.

        What it has found is worth noting then: that takes longer than the message, so it would
        cost a prompt that is looked up once.
        """
        is_known = first in self._asked
        self._asked[first] = None
        self._asked.move_to_end(first)
        if len(self._asked) > MAX_ASKED:
            self._asked.popitem(last=False)
        return is_known

    def note(self, keys: Sequence[bytes], slots: Int64s, generations: Int64s) -> None:
        """Note the slot of each block, and its generation while the block was there: int64 [n]."""
        if len(self._index) + len(keys) > self._most:
            self.forget()
        if len(keys) <= self._most:
            rows = as_array(self._index.make(keys))
            self._slots[rows], self._generations[rows] = slots, generations

    def num_there(self, keys: Sequence[bytes], generations: Int64s) -> int:
        """Return how many of the first blocks are still in their slots.

        generations: int64 [num_slots], of all slots of the partition now.
        """
        if self._index.find(keys[0]) is None:  # a new prompt
            return 0
        rows = as_array(self._index.find_all(keys).blocks)
        num = _num_leading(rows != NO_BLOCK)
        rows = rows[:num]
        return _num_leading(generations[self._slots[rows]] == self._generations[rows])


def _num_leading(are_true: Bools) -> int:
    """Return how many of the first ones are True."""
    return len(are_true) if are_true.all() else int(are_true.argmin())
