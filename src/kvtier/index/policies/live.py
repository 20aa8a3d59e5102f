"""The learned policy as a library, for a tier that the caller manages.

The caller reports requests and stored blocks; the policy chooses admissions and victims.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.core import hot
from kvtier.core.errors import ConfigError
from kvtier.core.hints import BlockHint
from kvtier.index.policies.counted import PolicyCounters

Keys = npt.NDArray[np.uint64]
_NOTHING = np.zeros(0, np.uint64)


class LivePolicy(PolicyCounters):
    """Learned policy for a tier of ``capacity_blocks`` blocks of the same size.

    A key names a whole prefix, up to the end of a block; for instance 64 bits of a chained hash.
    Two prompts have a key in common only if all blocks before it are the same, too.

        a request begins       asked(keys of its prompt, now)
        it has blocks to store keys = keys[: admits(keys, kept)], victims(too_many, kept), then
                               entered(keys)

    One thread owns the object.

    Args:
        capacity_blocks: capacity of the tier in blocks.
        seed: seed of the random choices; if there are many blocks, the policy samples.
        doubles_at_blocks: depth in a prompt at which a block is worth twice the first one; the
            value grows linearly. 0: all blocks have the same value.

    Raises:
        ValueError: a size is out of range, a time is not finite, or keys can't be those of a
            prompt.
        ConfigError: the native core is missing.
    """

    __slots__ = ("_core",)
    _core: hot.LivePolicy

    def __init__(
        self, capacity_blocks: int, *, seed: int = 7, doubles_at_blocks: float = 0.0
    ) -> None:
        if hot.LivePolicy is None:
            raise ConfigError(f"the learned policy needs the native core: {hot.NATIVE_REASON}")
        self._core = hot.LivePolicy(capacity_blocks, seed, doubles_at_blocks)

    def asked(self, keys: Keys, now_s: float) -> int:
        """Report a new request. Return how many of its first blocks are resident.

        Called once per request, before any of its blocks is stored.

        keys: uint64 [num_blocks], keys of all blocks of its prompt, resident or not.
        now_s: time in seconds, with any origin. A time before that of an earlier request counts as
            the latter.
        """
        return self._core.asked(keys, now_s)

    def retain(self, keys: Keys, block_hint: BlockHint, now_s: float) -> None:
        """Apply a hint on a prompt's future use to its blocks that are resident or requested.

        Args:
            keys: uint64 [num_blocks], keys of its blocks, from the first one on.
            said: the hint.
            now_s: as for ``asked``.
        """
        self._core.retain(keys, block_hint, now_s)

    def admits(self, keys: Keys, kept: Keys = _NOTHING) -> int:
        """Return how many of these blocks, from the first on, to admit.

        Blocks are admitted while there are free slots, then if they are worth more than the blocks
        that would be evicted for them. If too few blocks can be evicted, values are not compared.

        keys: uint64 [num_blocks], keys of absent blocks, the next ones of one or several prompts.
        kept: see ``victims``.
        """
        return self._core.admits(keys, kept)

    def entered(self, keys: Keys) -> None:
        """Report that blocks are resident now. Blocks that were resident before are ignored.

        There must be room for all of them.

        keys: uint64 [num_blocks], in prompt order. Blocks that were not in a request, such as those
        of an answer, continue the block before them in ``keys``; so pass their predecessor first.
        """
        self._core.entered(keys)

    def victims(self, num_blocks: int, kept: Keys = _NOTHING) -> list[int]:
        """Evict up to ``num_blocks`` blocks, and return their keys.

        kept: keys of blocks that must stay; the blocks before them in their prompts stay, too.
        """
        return self._core.victims(num_blocks, kept)

    def left(self, keys: Keys) -> None:
        """Report that blocks are no longer resident for another reason than ``victims``.

        Blocks that were not resident are ignored.
        """
        self._core.left(keys)
