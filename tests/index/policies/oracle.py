"""Plain versions of the replayed list policies, to compare the native core with.

Each is written from the description of its policy, over ordinary lists, in O(blocks) a step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence


class Oracle(ABC):
    """A tier of ``capacity`` blocks, driven by whole requests. A block's name is its path."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_stored = 0

    @abstractmethod
    def resident(self) -> Sequence[object]:
        """Return the blocks in the tier."""

    @property
    def num_history(self) -> int:
        """Return the number of evicted blocks that are remembered."""
        return 0

    @abstractmethod
    def serve(self, path: list[object]) -> None:
        """Use the blocks of a prompt, given by the names of its prefixes."""

    def request(self, keys: Sequence[int]) -> int:
        """Return how many of the first blocks of the prompt were resident."""
        path: list[object] = []
        for key in keys:
            path.append((path[-1] if path else None, key))
        resident = set(self.resident())
        hits = next((at for at, name in enumerate(path) if name not in resident), len(path))
        self.serve(path)
        return hits


class Lru(Oracle):
    """Least recently used first. A prompt's beginning counts as used after its end."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.order: list[object] = []

    def resident(self) -> list[object]:
        return self.order

    def serve(self, path: list[object]) -> None:
        first = next((at for at, name in enumerate(path) if name not in self.order), len(path))
        others = [name for name in self.order if name not in path[:first]]
        kept = path[: min(len(path), self.capacity)]
        self.num_stored += len(kept) - min(first, len(kept))
        others = others[max(0, len(others) + len(kept) - self.capacity) :]
        self.order = others + kept[::-1]


class _ByBlock(Oracle):
    """A policy that sees single blocks, not prompts. It gets a request's last block first."""

    def serve(self, path: list[object]) -> None:
        for name in reversed(path):
            if name in self.resident():
                self.hit(name)
            else:
                self.num_stored += 1
                self.miss(name)

    @abstractmethod
    def hit(self, name: object) -> None: ...
    @abstractmethod
    def miss(self, name: object) -> None: ...


class Arc(_ByBlock):
    """T1 (once) and T2 (often), with their ghosts B1 and B2, and the target size p of T1."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.t1: list[object] = []
        self.t2: list[object] = []
        self.b1: list[object] = []
        self.b2: list[object] = []
        self.p = 0.0

    def resident(self) -> list[object]:
        return self.t1 + self.t2

    @property
    def num_history(self) -> int:
        return len(self.b1) + len(self.b2)

    def hit(self, name: object) -> None:
        (self.t1 if name in self.t1 else self.t2).remove(name)
        self.t2.append(name)

    def miss(self, name: object) -> None:
        in_b1, in_b2 = name in self.b1, name in self.b2
        if in_b1:
            self.p = min(float(self.capacity), self.p + max(1.0, len(self.b2) / len(self.b1)))
        elif in_b2:
            self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))
        for ghosts, here in ((self.b1, in_b1), (self.b2, in_b2)):
            if here:
                ghosts.remove(name)
                ghosts.append(name)
        if len(self.resident()) == self.capacity:
            self._replace(in_b2)
        if in_b1 or in_b2:
            (self.b1 if in_b1 else self.b2).remove(name)
            self.t2.append(name)
            return
        while self.b1 and len(self.t1) + len(self.b1) > self.capacity - 1:
            self.b1.pop(0)
        self._bound(2 * self.capacity - 1)
        self.t1.append(name)

    def _replace(self, in_b2: bool) -> None:
        num = len(self.t1)
        from_t1 = num > self.p or (in_b2 and num == math.floor(self.p))
        if self.t1 and (from_t1 or not self.t2):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))
        self._bound(2 * self.capacity)

    def _bound(self, most: int) -> None:
        while self.num_history and len(self.resident()) + self.num_history > most:
            (self.b2 or self.b1).pop(0)


class S3Fifo(_ByBlock):
    """A small queue for new blocks, a main queue, and a ghost queue as long as the main one."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small: list[object] = []
        self.main: list[object] = []
        self.ghosts: list[object] = []
        self.uses: dict[object, int] = {}
        self.num_main = capacity - max(1, capacity // 10)

    def resident(self) -> list[object]:
        return self.small + self.main

    @property
    def num_history(self) -> int:
        return len(self.ghosts)

    def hit(self, name: object) -> None:
        self.uses[name] = min(3, self.uses[name] + 1)

    def miss(self, name: object) -> None:
        if name in self.ghosts:
            self.ghosts.remove(name)
            self.ghosts.append(name)
        if len(self.resident()) == self.capacity:
            self._evict()
        was_here = name in self.ghosts
        if was_here:
            self.ghosts.remove(name)
        (self.main if was_here else self.small).append(name)
        self.uses[name] = 0

    def _evict(self) -> None:
        while True:
            from_main = bool(self.main) and (len(self.main) > self.num_main or not self.small)
            name = (self.main if from_main else self.small).pop(0)
            if self.uses[name] > (0 if from_main else 1):
                self.uses[name] = self.uses[name] - 1 if from_main else 0
                self.main.append(name)
                continue
            if not from_main:
                self.ghosts.append(name)
                del self.ghosts[: max(0, len(self.ghosts) - self.num_main)]
            return


class Sieve(_ByBlock):
    """A hand moves from the oldest block to the newest, sparing each used block once."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.order: list[object] = []
        self.used: set[object] = set()
        self.hand = 0

    def resident(self) -> list[object]:
        return self.order

    def hit(self, name: object) -> None:
        self.used.add(name)

    def miss(self, name: object) -> None:
        if len(self.order) == self.capacity:
            while self.order[self.hand] in self.used:
                self.used.remove(self.order[self.hand])
                self.hand = (self.hand + 1) % len(self.order)
            del self.order[self.hand]
            if self.hand == len(self.order):
                self.hand = 0
        self.order.append(name)


class Lfuda(Oracle):
    """Least frequently used leaf first.

    A block's worth is its uses plus the age at its last use. The age is the highest worth evicted
    so far.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.blocks: dict[object, list[int]] = {}  # uses, worth, depth, number
        self.age = 0
        self.num_entered = 0

    def resident(self) -> list[object]:
        return list(self.blocks)

    def serve(self, path: list[object]) -> None:
        first = next((at for at, name in enumerate(path) if name not in self.blocks), len(path))
        for name in path[:first]:
            self._use(self.blocks[name])
        for at in range(first, len(path)):
            if len(self.blocks) == self.capacity and not self._evict(set(path[:at])):
                return
            self.blocks[path[at]] = [0, 0, at, self.num_entered]
            self.num_entered += 1
            self.num_stored += 1
            self._use(self.blocks[path[at]])

    def _use(self, block: list[int]) -> None:
        block[0] += 1
        block[1] = self.age + block[0]

    def _evict(self, held: set[object]) -> bool:
        parents = {name[0] for name in self.blocks}  # type: ignore[index]
        leaves = [name for name in self.blocks if name not in parents and name not in held]
        if not leaves:
            return False
        left = min(
            leaves,
            key=lambda name: (self.blocks[name][1], -self.blocks[name][2], self.blocks[name][3]),
        )
        self.age = max(self.age, self.blocks.pop(left)[1])
        return True


ORACLES: dict[str, type[Oracle]] = {
    "lru": Lru,
    "arc": Arc,
    "s3fifo": S3Fifo,
    "lfuda": Lfuda,
    "sieve": Sieve,
}
