"""Temporary holds on blocks in storage that were reported to an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core.types import BlockId
from kvtier.index import KeyIndex


@dataclass(slots=True, eq=False)
class _Hold:
    """Blocks reported in one answer and not read yet."""

    blocks: Sequence[BlockId]
    until_s: float


class Holds:
    """Holds on blocks of a storage tier. Each hold expires.

    An engine that never loads the blocks reported to it therefore holds none for ever.

    Args:
        index: blocks by key.
        tier: the storage.
        most: blocks that can be kept from eviction at a time. More are not held.
    """

    def __init__(self, index: KeyIndex, tier: str, most: int) -> None:
        self._index = index
        self._tier = tier
        self._most = most
        self._held: deque[_Hold] = deque()
        self._by_first: dict[BlockId, deque[_Hold]] = {}

    def __len__(self) -> int:
        """Return the number of held blocks; a block with several holds counts once per hold."""
        return sum(len(hold.blocks) for hold in self._held)

    def hold(self, blocks: Sequence[BlockId], until_s: float) -> None:
        """Keep blocks from eviction until ``until_s``, independently of other holds on them.

        blocks: the storage must have all of them. until_s: never less than in the last call.
        """
        num_stuck = self._index.num_held(self._tier) - self._index.num_evictable(self._tier)
        blocks = blocks[: max(0, self._most - num_stuck)]
        if blocks:
            self._index.lease(blocks, self._tier)
            hold = _Hold(blocks, until_s)
            self._held.append(hold)
            self._by_first.setdefault(blocks[0], deque()).append(hold)

    def release(self, first: BlockId, num_blocks: int) -> None:
        """Release the first ``num_blocks`` of the oldest hold that begins with ``first``."""
        if hold := self._take(first):
            read, hold.blocks = hold.blocks[:num_blocks], hold.blocks[num_blocks:]
            self._index.release(read, self._tier)
            if hold.blocks:
                self._by_first.setdefault(hold.blocks[0], deque()).append(hold)

    def expire(self, now_s: float) -> None:
        """Release expired holds. Constant time if there are none."""
        while self._held and (not self._held[0].blocks or self._held[0].until_s <= now_s):
            self._end(self._held.popleft())

    def clear(self) -> None:
        """Release all holds."""
        while self._held:
            self._end(self._held.popleft())

    def _end(self, hold: _Hold) -> None:
        if hold.blocks:
            same = self._by_first[hold.blocks[0]]
            same.remove(hold)
            if not same:
                del self._by_first[hold.blocks[0]]
            self._index.release(hold.blocks, self._tier)

    def _take(self, first: BlockId) -> _Hold | None:
        """Remove the oldest hold that begins with ``first`` from ``_by_first``, and return it."""
        same = self._by_first.get(first)
        if not same:
            return None
        hold = same.popleft()
        if not same:
            del self._by_first[first]
        return hold
