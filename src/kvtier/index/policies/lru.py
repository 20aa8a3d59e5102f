"""LRU eviction policy."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from kvtier.core.types import BlockId
from kvtier.index.policies.base import EvictionPolicy


class LruPolicy(EvictionPolicy):
    """LRU policy with a heap of (last use, block).

    If a block in the heap is touched, its old entry becomes stale. Stale entries are dropped when
    they reach the top, and the heap is rebuilt when they outnumber the candidates.
    """

    def __init__(self) -> None:
        self._last_use: dict[BlockId, float] = {}
        self._candidates: set[BlockId] = set()
        self._heap: list[tuple[float, BlockId]] = []

    def touch(self, block: BlockId, now: float) -> None:
        self._last_use[block] = now
        if block in self._candidates:
            self._push(block)

    def add(self, block: BlockId) -> None:
        self._candidates.add(block)
        self._push(block)

    def discard(self, block: BlockId) -> None:
        self._candidates.discard(block)

    def forget(self, block: BlockId) -> None:
        self._candidates.discard(block)
        self._last_use.pop(block, None)

    def victim(self) -> BlockId | None:
        while self._heap:
            last_use, block = self._heap[0]
            if block in self._candidates and self._last_use[block] == last_use:
                return block
            heappop(self._heap)
        return None

    def candidates(self) -> set[BlockId]:
        return set(self._candidates)

    def _push(self, block: BlockId) -> None:
        heappush(self._heap, (self._last_use[block], block))
        if len(self._heap) > 64 + 2 * len(self._candidates):
            self._heap = [(self._last_use[block], block) for block in self._candidates]
            heapify(self._heap)
