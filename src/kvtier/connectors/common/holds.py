"""Blocks that stay in storage for a while, for somebody was told that they are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.index import KeyIndex
from kvtier.types import BlockId


@dataclass(slots=True, eq=False)
class _Hold:
    """Blocks reported in one answer and not read yet."""

    blocks: Sequence[BlockId]
    until_s: float


class Holds:
    """Each ends by itself: whoever was told may never come.

    tier: the storage. most: blocks that can't leave at a time; more are not held.
    """

    def __init__(self, index: KeyIndex, tier: str, most: int) -> None:
        self._index = index
        self._tier = tier
        self._most = most
        self._line: deque[_Hold] = deque()
        self._by_first: dict[BlockId, deque[_Hold]] = {}

    def __len__(self) -> int:
        """Blocks that are held; one that several were told of counts for each."""
        return sum(len(hold.blocks) for hold in self._line)

    def hold(self, blocks: Sequence[BlockId], until_s: float) -> None:
        """They can't be evicted before ``until_s``, whatever becomes of what others were told.

        blocks: the storage has them all. until_s: never less than in the last call.
        """
        num_stuck = self._index.num_held(self._tier) - self._index.num_evictable(self._tier)
        blocks = blocks[: max(0, self._most - num_stuck)]
        if blocks:
            self._index.lease(blocks, self._tier)
            hold = _Hold(blocks, until_s)
            self._line.append(hold)
            self._by_first.setdefault(blocks[0], deque()).append(hold)

    def let_go(self, first: BlockId, num_blocks: int) -> None:
        """So many blocks from ``first`` on were read by one who was told of them."""
        if hold := self._take(first):
            read, hold.blocks = hold.blocks[:num_blocks], hold.blocks[num_blocks:]
            self._index.release(read, self._tier)
            if hold.blocks:
                self._by_first.setdefault(hold.blocks[0], deque()).append(hold)

    def expire(self, now_s: float) -> None:
        """Let go of those whose time is over. Costs nothing while none's is."""
        while self._line and (not self._line[0].blocks or self._line[0].until_s <= now_s):
            self._end(self._line.popleft())

    def clear(self) -> None:
        """Release all holds."""
        while self._line:
            self._end(self._line.popleft())

    def _end(self, hold: _Hold) -> None:
        if hold.blocks:
            same = self._by_first[hold.blocks[0]]
            same.remove(hold)
            if not same:
                del self._by_first[hold.blocks[0]]
            self._index.release(hold.blocks, self._tier)

    def _take(self, first: BlockId) -> _Hold | None:
        """The oldest that begins with ``first``, to be put back under another one."""
        same = self._by_first.get(first)
        if not same:
            return None
        hold = same.popleft()
        if not same:
            del self._by_first[first]
        return hold
