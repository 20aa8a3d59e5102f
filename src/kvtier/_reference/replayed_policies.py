"""Policies that others have, driven by whole requests: the twins of
``native/policy/replayed_lists.hpp``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence

from kvtier._reference.lfuda import Lfuda
from kvtier._reference.live_queues import LiveQueues
from kvtier._reference.live_runs import Place
from kvtier._reference.queues import Queues
from kvtier._reference.runs import Block


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
        self._blocks: OrderedDict[int, None] = OrderedDict()  # the oldest first

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
            self._blocks[key] = None
        return hits


class Lists(Replayed):
    """As their authors describe them: they know blocks, and no prompts. Those of a request are used
    from the last to the first."""

    def __init__(self, make: Callable[[int], Queues], capacity: int) -> None:
        super().__init__(capacity)
        self._lists = make(capacity)

    @property
    def num_blocks(self) -> int:
        return self._lists.num_blocks

    @property
    def num_history(self) -> int:  # type: ignore[override]
        return self._lists.num_history

    def request(self, path: Sequence[int], now: float) -> int:
        hits = 0
        while hits < len(path) and self._has(path[hits]):
            hits += 1
        for key in reversed(path):
            self._use(key)
        return hits

    def _has(self, key: int) -> bool:
        entry = self._lists.find(key)
        return entry is not None and entry.is_resident

    def _use(self, key: int) -> None:
        entry = self._lists.find(key)
        if entry is not None and entry.is_resident:
            self._lists.hit(entry)
            return
        self.num_stored += 1
        if entry is not None:
            self._lists.missed(entry)
        if self.num_blocks == self.capacity:
            self._lists.begin_evicting()
            self._lists.leave(lambda block: True)
        self._lists.enter(key, Block(key, None), 0)

    def check_invariants(self) -> None:
        super().check_invariants()
        self._lists.check_invariants()


class LeastUsed(Replayed):
    """LFU with ageing, leaves first; a request's own blocks don't leave for its later ones."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._blocks: dict[int, Block] = {}
        self._held: set[Block] = set()
        self._queues = LiveQueues(
            Lfuda(capacity),
            capacity,
            lambda block, num_gone: block not in self._held,
            self._blocks.get,
        )

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def request(self, path: Sequence[int], now: float) -> int:
        hits = _num_first(path, self._blocks)
        found = [self._blocks[key] for key in path[:hits]]
        self._queues.use(path, found)
        self._held = set(found)
        self._store(path, found)
        self._held = set()
        if found:
            self._queues.let_go(found[-1])
        return hits

    def _store(self, path: Sequence[int], found: list[Block]) -> None:
        for at in range(len(found), len(path)):
            if self.num_blocks == self.capacity:
                left = self._queues.next_victim()
                if left is None:
                    return
                del self._blocks[left.key]
            place = Place(found[-1] if found else None, at)
            block = self._queues.entered(path[at], 0, place)
            self._blocks[block.key] = block
            self._held.add(block)
            found.append(block)
            self.num_stored += 1

    def check_invariants(self) -> None:
        super().check_invariants()
        self._queues.check_invariants()


def _num_first(path: Sequence[int], resident: Container[int]) -> int:
    """How many of the first are resident."""
    return next((at for at, key in enumerate(path) if key not in resident), len(path))
