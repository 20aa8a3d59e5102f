"""Policies that others have, replayed: the twins of ``native/policy/list_policies.hpp`` and
``lfuda.hpp``, which name their sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import floor

Blocks = OrderedDict[int, int]
"""Keys, the oldest first, with a number of the policy's own."""


class Replayed(ABC):
    """A tier of ``capacity`` blocks, driven by whole requests."""

    num_history = 0

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_stored = 0

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Resident ones."""

    @abstractmethod
    def request(self, path: Sequence[int], now: float) -> int:
        """A prompt, by the names of its prefixes. How many of its first blocks were resident."""

    def check_invariants(self) -> None:
        """Raise AssertionError where it has more than it may."""
        assert self.num_blocks <= self.capacity, "more blocks than there is room for"
        assert self.num_blocks + self.num_history <= 2 * self.capacity, "too much is remembered"


class Lru(Replayed):
    """Least recently used first; the beginning of a prompt counts as used last."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._blocks: Blocks = OrderedDict()

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def request(self, path: Sequence[int], now: float) -> int:
        hits = _num_first(path, self._blocks)
        for key in path[:hits]:
            del self._blocks[key]
        kept = list(path[:hits])
        for key in path[hits:]:
            if len(kept) + len(self._blocks) == self.capacity:
                if not self._blocks:
                    break
                self._blocks.popitem(last=False)
            kept.append(key)
            self.num_stored += 1
        for key in reversed(kept):
            self._blocks[key] = 0
        return hits


class _ListPolicy(Replayed):
    """Knows blocks, and no prompts: those of a request are used from the last to the first."""

    def request(self, path: Sequence[int], now: float) -> int:
        hits = 0
        while hits < len(path) and self._has(path[hits]):
            hits += 1
        for key in reversed(path):
            self._use(key)
        return hits

    @abstractmethod
    def _has(self, key: int) -> bool: ...

    @abstractmethod
    def _use(self, key: int) -> None: ...


class Arc(_ListPolicy):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once, self._often, self._once_gone, self._often_gone = (
            OrderedDict[int, int]() for _ in range(4)
        )
        self._target = 0.0

    @property
    def num_blocks(self) -> int:
        return len(self._once) + len(self._often)

    @property
    def num_history(self) -> int:  # type: ignore[override]
        return len(self._once_gone) + len(self._often_gone)

    def _has(self, key: int) -> bool:
        return key in self._once or key in self._often

    def _use(self, key: int) -> None:
        if self._has(key):
            self._once.pop(key, None)
            self._often.pop(key, None)
            self._often[key] = 0
            return
        self.num_stored += 1
        once_gone, often_gone = self._once_gone, self._often_gone
        if key in once_gone:
            step = max(1.0, len(often_gone) / len(once_gone))
            self._target = min(float(self.capacity), self._target + step)
            self._make_room(was_often=False)
            del once_gone[key]
            self._often[key] = 0
            return
        if key in often_gone:
            step = max(1.0, len(once_gone) / len(often_gone))
            self._target = max(0.0, self._target - step)
            self._make_room(was_often=True)
            del often_gone[key]
            self._often[key] = 0
            return
        if len(self._once) + len(once_gone) >= self.capacity:
            if len(self._once) < self.capacity:
                once_gone.popitem(last=False)
                self._make_room(was_often=False)
            else:
                self._once.popitem(last=False)
        elif self.num_blocks + self.num_history >= self.capacity:
            if self.num_blocks + self.num_history >= 2 * self.capacity:
                often_gone.popitem(last=False)
            self._make_room(was_often=False)
        self._once[key] = 0

    def _make_room(self, *, was_often: bool) -> None:
        num = len(self._once)
        is_once = num > self._target or (was_often and num == floor(self._target))
        if num and (is_once or not self._often):
            self._once_gone[self._once.popitem(last=False)[0]] = 0
        elif self._often:
            self._often_gone[self._often.popitem(last=False)[0]] = 0


class S3Fifo(_ListPolicy):
    """The numbers of the lists are counts of uses."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._num_small = max(1, capacity // 10)
        self._small, self._main, self._gone = (OrderedDict[int, int]() for _ in range(3))

    @property
    def num_blocks(self) -> int:
        return len(self._small) + len(self._main)

    @property
    def num_history(self) -> int:  # type: ignore[override]
        return len(self._gone)

    def _has(self, key: int) -> bool:
        return key in self._small or key in self._main

    def _use(self, key: int) -> None:
        for blocks in (self._small, self._main):
            if key in blocks:
                blocks[key] = min(3, blocks[key] + 1)
                return
        self.num_stored += 1
        was_here = self._gone.pop(key, None) is not None
        while self.num_blocks >= self.capacity:
            if len(self._small) >= self._num_small or not self._main:
                self._leave_small()
            else:
                self._leave_main()
        (self._main if was_here else self._small)[key] = 0

    def _leave_small(self) -> None:
        num_main = self.capacity - self._num_small
        while self._small:
            key, count = self._small.popitem(last=False)
            if count <= 1:
                self._gone[key] = 0
                if len(self._gone) > num_main:
                    self._gone.popitem(last=False)
                return
            self._main[key] = 0
            if len(self._main) > num_main:
                self._leave_main()

    def _leave_main(self) -> None:
        while self._main:
            key, count = self._main.popitem(last=False)
            if count == 0:
                return
            self._main[key] = count - 1


class Sieve(_ListPolicy):
    """The hand goes from the oldest block to the newest."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: list[int] = []
        self._was_used: dict[int, bool] = {}
        self._hand = 0

    @property
    def num_blocks(self) -> int:
        return len(self._order)

    def _has(self, key: int) -> bool:
        return key in self._was_used

    def _use(self, key: int) -> None:
        if key in self._was_used:
            self._was_used[key] = True
            return
        self.num_stored += 1
        if len(self._order) >= self.capacity:
            while self._was_used[self._order[self._hand]]:
                self._was_used[self._order[self._hand]] = False
                self._hand = (self._hand + 1) % len(self._order)
            del self._was_used[self._order.pop(self._hand)]
            if self._hand == len(self._order):
                self._hand = 0
        self._order.append(key)
        self._was_used[key] = False


@dataclass(slots=True, eq=False)
class _Counted:
    key: int
    parent: _Counted | None
    depth: int
    made: int
    worth: int = 0
    num_uses: int = 0
    num_children: int = 0
    request: int = 0


_Entry = tuple[int, int, int, int]
"""What a leaf is worth, its depth below zero, when it was made, its key."""


class Lfuda(Replayed):
    """Least frequently used leaf first, with ageing; of those that are worth the same the deepest,
    then the one that was made first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._blocks: dict[int, _Counted] = {}
        self._heap: list[_Entry] = []
        self._last_worth = 0
        self._num_requests = 0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def request(self, path: Sequence[int], now: float) -> int:
        self._num_requests += 1
        hits = _num_first(path, self._blocks)
        blocks = [self._blocks[key] for key in path[:hits]]
        for block in blocks:
            self._use(block)
        for at, key in enumerate(path[hits:], hits):
            if len(self._blocks) == self.capacity and not self._make_room():
                break
            block = _Counted(key, blocks[-1] if blocks else None, at, self.num_stored)
            if blocks:
                blocks[-1].num_children += 1
            self._use(block)
            self._blocks[key] = block
            blocks.append(block)
            self.num_stored += 1
        if blocks and blocks[-1].num_children == 0:
            self._offer(blocks[-1])
        return hits

    def _use(self, block: _Counted) -> None:
        block.num_uses += 1
        block.worth = self._last_worth + block.num_uses
        block.request = self._num_requests

    def _offer(self, block: _Counted) -> None:
        heappush(self._heap, (block.worth, -block.depth, block.made, block.key))
        if len(self._heap) > 64 + 4 * len(self._blocks):
            self._heap = [entry for entry in set(self._heap) if self._holds(entry)]
            heapify(self._heap)

    def _holds(self, entry: _Entry) -> bool:
        worth, _, made, key = entry
        block = self._blocks.get(key)
        return (
            block is not None
            and block.num_children == 0
            and (block.worth, block.made) == (worth, made)
        )

    def _make_room(self) -> bool:
        while self._heap:
            entry = heappop(self._heap)
            if not self._holds(entry):
                continue
            block = self._blocks[entry[-1]]
            self._last_worth = max(self._last_worth, block.worth)
            del self._blocks[block.key]
            parent = block.parent
            if parent is not None:
                parent.num_children -= 1
                if parent.num_children == 0 and parent.request != self._num_requests:
                    self._offer(parent)
            return True
        return False


def _num_first(path: Sequence[int], resident: Blocks | dict[int, _Counted]) -> int:
    """How many of the first are resident."""
    return next((at for at, key in enumerate(path) if key not in resident), len(path))
