"""Policies over one tier of blocks, driven by the requests of a trace.

To compare them, and to see what a tier of a size would hold.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier import _hot
from kvtier.errors import ConfigError
from kvtier.index.policies.counted import Counted

RUNS: Final = "runs"
LRU: Final = "lru"
POLICIES: Final = (RUNS, LRU, "arc", "s3fifo", "lfuda", "sieve")
"""By name: kvtier's own that learns; least recently used; ARC; S3-FIFO; least frequently used with
ageing; SIEVE. The tiers of a running cache can use each of them, too."""


class PolicyReplay(Counted):
    """A tier of ``capacity_blocks`` blocks of one size under one policy; no bytes are kept.

    policy: one of ``POLICIES``. seed: of what ``runs`` leaves to chance: among many blocks it looks
    at some. doubles_at_blocks: for ``runs``, what hits are worth: the block so deep in a prompt is
    worth twice what the first one is, and so on in proportion, as the time that it saves is where
    attention costs more towards the end; 0: all are worth the same.

    ``arc``, ``s3fifo`` and ``sieve`` know blocks and no prompts: they are told of those of a
    request from the last to the first. The others know paths, keep a block only with all before it,
    and never let a request's blocks leave for its later ones.

    Handles a million and more block references per second. Owned by one thread. Raises ValueError
    for an unknown policy or a size out of range, ConfigError where the native core is missing.
    """

    __slots__ = ("_core", "policy")
    _core: _hot.PolicyReplay

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
        if _hot.PolicyReplay is None:
            raise ConfigError(
                f"policy {policy!r} can't be replayed without the native core: {_hot.NATIVE_REASON}"
            )
        self._core = _hot.PolicyReplay(policy, capacity_blocks, seed, doubles_at_blocks)

    def request(self, keys: npt.NDArray[np.uint64], now_s: float) -> int:
        """A prompt arrives, with a block for each key.

        Returns how many blocks from its first on were cached; afterwards all of it is that the
        policy lets in.

        keys: uint64 [num_blocks], of any length. What two prompts have in common are the blocks up
        to the first key that differs, whatever comes behind. now_s: seconds since any moment; one
        that lies before that of an earlier request counts as that one.
        """
        return self._core.request(keys, now_s)

    @property
    def num_stored(self) -> int:
        """Blocks that were written since the beginning: hits are not."""
        return self._core.num_stored()
