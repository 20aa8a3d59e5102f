"""Replay of a trace's requests through an eviction policy over one tier.

It serves to compare policies, and to find the hits of a tier of a given size.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core import hot
from kvtier.core.errors import ConfigError
from kvtier.index.policies.counted import PolicyCounters

RUNS: Final = "runs"
LRU: Final = "lru"
POLICIES: Final = (RUNS, LRU, "arc", "s3fifo", "lfuda", "sieve")
"""Names of the policies, for replays and for the tiers of a running cache.

- ``runs``, kvtier's learned policy, learns which prompts are reused, and when.
- ``lru`` evicts the least recently used block. Without the native core it replaces the others.
- ``arc`` has an LRU list of blocks requested once, and one of blocks requested more often. Misses
  on recently evicted blocks move the boundary between them.
- ``s3fifo``: new blocks enter a FIFO queue of a tenth of the capacity. Blocks requested again
  there, or soon after eviction, enter the main one.
- ``lfuda`` evicts the least frequently used block; old uses count less.
- ``sieve``: a hand from the oldest block to the newest evicts those unused since its last pass.

``native/policy/list_policies.hpp`` and ``lfuda.hpp`` implement the last four and name their
sources. In a tier they count a request for a block as its use, evict the end of a prompt before its
start, and admit every block.
"""


class PolicyReplay(PolicyCounters):
    """Simulated tier of blocks of the same size under one policy; it holds no bytes.

    ``arc``, ``s3fifo`` and ``sieve`` know single blocks only: the blocks of a request are reported
    to them from the last to the first. The other policies know prompts: they keep a block only with
    all blocks before it, and never evict a request's blocks for its later ones.

    The replay processes more than a million block references per second. One thread owns it.

    Args:
        policy: one of ``POLICIES``.
        capacity_blocks: capacity of the tier in blocks.
        seed: seed of the random choices of ``runs``; if there are many blocks, it samples.
        doubles_at_blocks: for ``runs``, the depth in a prompt at which a block is worth twice the
            first one; the value grows linearly, like the time to recompute a block with attention.
            0: all blocks have the same value.

    Raises:
        ValueError: the policy is unknown, or a size is out of range.
        ConfigError: the native core is missing.
    """

    __slots__ = ("_core", "policy")
    _core: hot.PolicyReplay

    def __init__(
        self,
        policy: str,
        capacity_blocks: int,
        *,
        seed: int = 7,
        doubles_at_blocks: float = 0.0,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"no policy is called {policy!r}; there are {', '.join(POLICIES)}")
        self.policy = policy
        if hot.PolicyReplay is None:
            raise ConfigError(
                f"policy {policy!r} can't be replayed without the native core: {hot.NATIVE_REASON}"
            )
        self._core = hot.PolicyReplay(policy, capacity_blocks, seed, doubles_at_blocks)

    def request(self, keys: npt.NDArray[np.uint64], now_s: float) -> int:
        """Process a request. Return how many of its first blocks were cached.

        Afterwards all of its blocks that the policy admits are cached.

        keys: uint64 [num_blocks], key of each block of the prompt. Two prompts share the blocks
            before the first key that differs.
        now_s: time in seconds, with any origin. A time before that of an earlier request counts as
            the latter.
        """
        return self._core.request(keys, now_s)

    @property
    def num_stored(self) -> int:
        """Number of blocks that were written since the start; hits are not written."""
        return self._core.num_stored()
