"""Least frequently used first, with ageing: the twin of ``native/policy/lfuda.hpp``."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from kvtier._reference.queues import Entry, MayLeave, Queues
from kvtier._reference.runs import Block

_Waiting = tuple[int, int, int, Entry]
"""What a block is worth, its place below zero, as which of all blocks it came; no two are alike."""


class Lfuda(Queues):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._num_blocks = 0
        self._heap: list[_Waiting] = []
        self._last_worth = 0
        self._num_entered = 0

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def hit(self, entry: Entry) -> None:
        entry.num_uses += 1
        entry.worth = self._last_worth + entry.num_uses

    def missed(self, entry: Entry) -> None:
        raise AssertionError("nothing is remembered")

    def enter(self, key: int, block: Block, at: int) -> Entry:
        entry = Entry(key, block, at, number=self._num_entered)
        self._num_entered += 1
        self._num_blocks += 1
        self.hit(entry)
        self._push(entry)
        return entry

    def leave(self, may_leave: MayLeave) -> Block | None:
        while self._heap:
            worth, _, _, entry = heappop(self._heap)
            if not entry.is_resident:
                continue
            if worth != entry.worth:
                self._push(entry)
            elif may_leave(entry.block):
                self._last_worth = max(self._last_worth, worth)
                self._discard(entry)
                return entry.block
            else:
                entry.is_parked = True
        return None

    def come_back(self, entry: Entry) -> None:
        if entry.is_parked:
            entry.is_parked = False
            self._push(entry)

    def remove(self, entry: Entry) -> None:
        self._discard(entry)
        if len(self._heap) > 64 + 2 * self._num_blocks:
            self._heap = [waiting for waiting in self._heap if waiting[-1].is_resident]
            heapify(self._heap)

    def _push(self, entry: Entry) -> None:
        heappush(self._heap, (entry.worth, -entry.at, entry.number, entry))

    def _discard(self, entry: Entry) -> None:
        entry.is_resident = False
        self._num_blocks -= 1
