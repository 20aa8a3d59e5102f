"""Blocks that stay in storage for a while, for somebody was told that they are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvtier.index import KeyIndex
from kvtier.types import BlockId


class Holds:
    """Each ends by itself: whoever was told may never come.

    tier: the storage. most: blocks held at a time; others are not.
    """

    def __init__(self, index: KeyIndex, tier: str, most: int) -> None:
        self._index = index
        self._tier = tier
        self._most = most
        self._ends: dict[BlockId, float] = {}
        self._line: deque[tuple[float, Sequence[BlockId]]] = deque()

    def __len__(self) -> int:
        """Blocks that are held."""
        return len(self._ends)

    def hold(self, blocks: Sequence[BlockId], until_s: float) -> None:
        """They can't be evicted before ``until_s``; later calls don't end earlier ones.

        blocks: the storage has them all. until_s: never less than in the last call.
        """
        new = [block for block in blocks if block not in self._ends]
        new = new[: max(0, self._most - len(self._ends))]
        self._index.lease(new, self._tier)
        if len(new) == len(blocks):
            held: Sequence[BlockId] = new
        else:
            added = set(new)
            held = [block for block in blocks if block in self._ends or block in added]
        self._ends.update(dict.fromkeys(held, until_s))
        if held:
            self._line.append((until_s, held))

    def let_go(self, blocks: Iterable[BlockId]) -> None:
        """They were read, or nobody wants them any more; those that are not held are passed
        over."""
        held = [block for block in blocks if self._ends.pop(block, None) is not None]
        self._index.release(held, self._tier)

    def expire(self, now_s: float) -> None:
        """Let go of those whose time is over. Costs nothing while none's is."""
        while self._line and self._line[0][0] <= now_s:
            _, blocks = self._line.popleft()
            self.let_go([block for block in blocks if self._ends.get(block, now_s) < now_s])

    def clear(self) -> None:
        """Let go of all."""
        self.let_go(list(self._ends))
        self._line.clear()
