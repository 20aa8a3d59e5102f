"""The policy that learns, for a tier that somebody else keeps.

Told what happens there, it says what is let in and what leaves.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier import _hot
from kvtier.errors import ConfigError
from kvtier.hints import Said
from kvtier.index.policies.counted import Counted

Keys = npt.NDArray[np.uint64]
_NOTHING = np.zeros(0, np.uint64)


class LivePolicy(Counted):
    """A tier of ``capacity_blocks`` blocks of one size.

    A key names a whole prefix, up to the end of a block: 64 bits of a hash that is chained, for
    instance. Two prompts have the same key only where all before it is the same, too.

    seed: of what is left to chance: among many blocks it looks at some. doubles_at_blocks: the
    block so deep in a prompt is worth twice what the first one is, and so on in proportion; 0: all
    are worth the same.

        a request begins       asked(keys of its prompt, now)
        it has blocks to store keys = keys[: admits(keys, kept)], victims(too_many, kept), then
                               entered(keys)

    Owned by one thread. ValueError for a size out of range, a time that is not finite, and keys
    that can't be those of a prompt.
    """

    __slots__ = ("_core",)
    _core: _hot.LivePolicy

    def __init__(
        self, capacity_blocks: int, *, seed: int = 7, doubles_at_blocks: float = 0.0
    ) -> None:
        if _hot.LivePolicy is None:
            raise ConfigError(f"the learned policy needs the native core: {_hot.NATIVE_REASON}")
        self._core = _hot.LivePolicy(capacity_blocks, seed, doubles_at_blocks)

    def asked(self, keys: Keys, now_s: float) -> int:
        """A request begins; to be told once of each, before anything is stored for it.

        keys: uint64 [num_blocks], of all blocks of its prompt, resident or not. now_s: seconds
        since any moment; one that lies before that of an earlier request counts as that one.
        Returns how many of its first blocks are resident.
        """
        return self._core.asked(keys, now_s)

    def retain(self, keys: Keys, said: Said, now_s: float) -> None:
        """Somebody says something of a prompt.

        Of what is resident of it, or was asked for and is to come. keys: of its blocks, from the
        first one on. now_s: as for ``asked``.
        """
        self._core.retain(keys, said, now_s)

    def admits(self, keys: Keys, kept: Keys = _NOTHING) -> int:
        """Return how many of the first of these blocks are worth their room.

        Those for which there are free slots, then those worth more than what would leave for them.

        Nothing is compared if too little may leave.

        keys: of blocks that are not resident, the next ones of a prompt, or of several. kept: see
        ``victims``.
        """
        return self._core.admits(keys, kept)

    def entered(self, keys: Keys) -> None:
        """Blocks are resident now, no more than there is room for; those that were are passed over.

        keys: in the order of their prompt. Blocks that nobody has asked for, such as those of an
        answer, lie behind the block before them in ``keys``, resident or new: give that first.
        """
        self._core.entered(keys)

    def victims(self, num_blocks: int, kept: Keys = _NOTHING) -> list[int]:
        """Keys of up to ``num_blocks`` blocks that have left by this.

        kept: of those that may not; nor may what lies in front of them.
        """
        return self._core.victims(num_blocks, kept)

    def left(self, keys: Keys) -> None:
        """Blocks are not resident any more, for another reason.

        Those that were not are passed over.
        """
        self._core.left(keys)
