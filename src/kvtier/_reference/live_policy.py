"""The policy that works on runs, over blocks that somebody else keeps: the twin of the native
class."""

from __future__ import annotations

import math
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from kvtier._reference.arguments import words_of
from kvtier._reference.live_runs import LiveRuns
from kvtier._reference.policy_replay import check_doubling, check_room
from kvtier._reference.runs import Block
from kvtier.hints import Said, check_said


class LivePolicy:
    """See ``kvtier.index.policies.live``."""

    def __init__(self, capacity_blocks: int, seed: int = 7, doubles_at_blocks: float = 0.0) -> None:
        check_room(capacity_blocks)
        check_doubling(doubles_at_blocks)
        self._capacity = capacity_blocks
        self._blocks: dict[int, Block] = {}
        self._kept: set[int] = set()
        self._policy = LiveRuns(
            capacity_blocks,
            seed,
            doubles_at_blocks,
            lambda block, num_gone: block.key not in self._kept,
            self._blocks.get,
        )
        self._now = -math.inf

    def asked(self, keys: NDArray[np.uint64], now_s: float) -> int:
        path = words_of("keys", keys).tolist()
        self._note_time(now_s)
        if len(set(path)) < len(path):
            raise ValueError("keys name whole prefixes: no two of a prompt are alike")
        found = self._found(path)
        self._policy.asked(path, found, self._now)
        return len(found)

    def retain(self, keys: NDArray[np.uint64], said: Said, now_s: float) -> None:
        path = words_of("keys", keys).tolist()
        check_said(said)
        self._note_time(now_s)
        self._policy.retain(path, self._found(path), said, self._now)

    def _note_time(self, now_s: float) -> None:
        if not math.isfinite(now_s):
            raise ValueError("now_s must be a finite number of seconds")
        self._now = max(self._now, now_s)

    def _found(self, path: list[int]) -> list[Block]:
        there = takewhile(self._blocks.__contains__, path)
        return [self._blocks[key] for key in there]

    def admits(self, keys: NDArray[np.uint64], kept: NDArray[np.uint64]) -> int:
        names = words_of("keys", keys).tolist()
        self._kept = set(words_of("keys", kept).tolist())
        which = self._policy.admit(names, self._capacity - len(self._blocks))
        self._kept = set()
        return len(which)

    def entered(self, keys: NDArray[np.uint64]) -> None:
        behind: Block | None = None
        for key in words_of("keys", keys).tolist():
            if key not in self._blocks:
                if len(self._blocks) == self._capacity:
                    raise ValueError(
                        f"there is room for {self._capacity} blocks, and all of it is used"
                    )
                self._blocks[key] = self._policy.entered(key, 0, None, behind)
            behind = self._blocks[key]

    def victims(self, num_blocks: int, kept: NDArray[np.uint64]) -> list[int]:
        self._kept = set(words_of("keys", kept).tolist())
        left = [block.key for block in self._policy.evict(num_blocks)]
        self._kept = set()
        for key in left:
            del self._blocks[key]
        return left

    def left(self, keys: NDArray[np.uint64]) -> None:
        for key in words_of("keys", keys).tolist():
            if key in self._blocks:
                self._policy.left(self._blocks.pop(key))

    def num_blocks(self) -> int:
        return len(self._blocks)

    def num_history(self) -> int:
        return self._policy.num_history

    def num_bytes(self) -> int:
        """Memory, about: what dictionaries need for a block, and for an entry of the history."""
        return 300 * len(self._blocks) + 200 * self._policy.num_history

    def check_invariants(self) -> None:
        self._policy.check_invariants()
        assert self._policy.num_blocks == len(self._blocks), "a block is lost"
