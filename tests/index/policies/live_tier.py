"""A tier that drives a live policy as its owner would, for tests."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np

from tests.index.policies.traffic import Keys

WORD = (1 << 64) - 1


def names(keys: Keys) -> Keys:
    """Return the names of the prefixes that end with each key."""
    chained = accumulate(keys.tolist(), lambda before, key: hash((before, key)) & WORD, initial=1)
    return np.array(list(chained)[1:], np.uint64)


class Tier:
    """A tier that stores the requested blocks that its policy admits.

    check: check the policy's invariants after every change.
    """

    def __init__(self, policy: Any, capacity: int, check: bool = False) -> None:
        self.policy = policy
        self.capacity = capacity
        self.blocks: set[int] = set()
        self.num_stored = 0
        self._check = check

    def request(self, keys: Keys, now: float) -> int:
        """Return the number of hits. All new blocks are stored at once."""
        path = names(keys)
        hits = self.policy.asked(path, now)
        new = np.array([name for name in path.tolist() if name not in self.blocks], np.uint64)
        self.store(new, path)
        return int(hits)

    def store(self, new: Keys, kept: Keys) -> int:
        """Store the leading new blocks that are admitted and fit. Return their number."""
        num = int(self.policy.admits(new, kept))
        self.lose(num - self.num_free, kept)
        num = min(num, self.num_free)
        self.policy.entered(new[:num])
        self.blocks.update(new[:num].tolist())
        self.num_stored += num
        self.check()
        return num

    def lose(self, num: int, kept: Keys) -> list[int]:
        left = self.policy.victims(num, kept)
        assert len(left) <= max(0, num)
        assert len(set(left)) == len(left)
        assert self.blocks.issuperset(left), "a block left that was not there"
        assert not set(left) & set(kept.tolist()), "a block left that had to stay"
        self.blocks.difference_update(left)
        self.check()
        return list(left)

    @property
    def num_free(self) -> int:
        return self.capacity - len(self.blocks)

    def check(self) -> None:
        assert self.policy.num_blocks() == len(self.blocks) <= self.capacity
        assert self.policy.num_history() <= 2 * self.capacity
        if self._check:
            self.policy.check_invariants()
