"""The policy that works on runs, driven by whole requests: the twin of
``native/policy/replayed_runs.hpp``."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier._reference.run_policy import RunPolicy
from kvtier._reference.runs import Block


class ReplayedRuns:
    """See ``kvtier.index.policies.replayed``."""

    def __init__(self, capacity: int, seed: int, doubles_at_blocks: float) -> None:
        self._capacity = capacity
        self._policy = RunPolicy(capacity, seed, doubles_at_blocks)
        self._blocks: dict[int, Block] = {}
        self.num_stored = 0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_history(self) -> int:
        return self._policy.num_history

    def request(self, path: Sequence[int], now: float) -> int:
        if not path:
            return 0
        found: list[Block] = []
        for key in path:
            if key not in self._blocks:
                break
            found.append(self._blocks[key])
        num_hits = len(found)
        self._policy.begin(path, found, now)
        self._store(path, found)
        self._policy.keep_runs(path, found, tries_all=True)
        return num_hits

    def _store(self, path: Sequence[int], found: list[Block]) -> None:
        for part in self._policy.parts:
            if part.hi <= len(found):
                continue
            gain = self._policy.gain(part)
            while len(found) < part.hi:
                if not self._make_room(gain):
                    return
                block = self._policy.add(path[len(found)], found[-1] if found else None)
                self._blocks[block.key] = block
                found.append(block)
                self.num_stored += 1

    def _make_room(self, gain: float) -> bool:
        if len(self._blocks) < self._capacity:
            return True
        left = self._policy.lose_one(gain)
        if left is None:
            return False
        del self._blocks[left.key]
        return True

    def check_invariants(self) -> None:
        """Raise AssertionError where runs, blocks and ghosts disagree."""
        self._policy.check_invariants()
        assert self.num_blocks <= self._capacity, "more blocks than there is room for"
        assert self._policy.num_blocks == self.num_blocks, "a block is lost"
