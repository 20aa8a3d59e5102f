"""A policy over one tier of blocks, replayed: the twin of the native class."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvtier._reference.arguments import words_of
from kvtier._reference.queues import Arc, S3Fifo, Sieve
from kvtier._reference.replayed_policies import LeastUsed, Lists, Lru, Replayed
from kvtier._reference.replayed_runs import ReplayedRuns

MAX_BLOCKS = 1 << 31

_OTHERS: dict[str, Callable[[int], Replayed]] = {
    "lru": Lru,
    "arc": partial(Lists, Arc),
    "s3fifo": partial(Lists, S3Fifo),
    "lfuda": LeastUsed,
    "sieve": partial(Lists, Sieve),
}


def check_room(capacity_blocks: int) -> None:
    """Raise ValueError where a tier can't have so much room."""
    if not 1 <= capacity_blocks <= MAX_BLOCKS:
        raise ValueError(f"capacity_blocks: {capacity_blocks} is not in 1 .. {MAX_BLOCKS}")


def check_doubling(doubles_at_blocks: float) -> None:
    """Raise ValueError for what is no number of blocks."""
    if not doubles_at_blocks >= 0.0 or math.isinf(doubles_at_blocks):
        raise ValueError("doubles_at_blocks must be 0 or a number of blocks above it")


class PolicyReplay:
    """See ``kvtier.index.policies.replayed``."""

    def __init__(
        self, policy: str, capacity_blocks: int, seed: int = 7, doubles_at_blocks: float = 0.0
    ) -> None:
        check_room(capacity_blocks)
        check_doubling(doubles_at_blocks)
        self._policy: Replayed | ReplayedRuns
        if policy == "runs":
            self._policy = ReplayedRuns(capacity_blocks, seed, doubles_at_blocks)
        elif policy in _OTHERS:
            self._policy = _OTHERS[policy](capacity_blocks)
        else:
            raise ValueError(f"no policy is called '{policy}'")
        self._now = -math.inf

    def request(self, keys: NDArray[np.uint64], now_s: float) -> int:
        words = words_of("keys", keys)
        if not math.isfinite(now_s):
            raise ValueError("now_s must be a finite number of seconds")
        self._now = max(self._now, now_s)
        path: list[int] = []
        before = 0
        for key in words.tolist():
            # Blocks are the same only where all before them are.
            before = hash((before, key))
            path.append(before)
        return self._policy.request(path, self._now)

    def num_blocks(self) -> int:
        return self._policy.num_blocks

    def num_stored(self) -> int:
        return self._policy.num_stored

    def num_history(self) -> int:
        return self._policy.num_history

    def num_bytes(self) -> int:
        """Memory, about: what dictionaries need for a block, and for an entry of the history."""
        return 300 * self._policy.num_blocks + 200 * self._policy.num_history

    def check_invariants(self) -> None:
        self._policy.check_invariants()
