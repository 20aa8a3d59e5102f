"""Sample of evicted blocks that are requested again, by tier, and the time until they are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvtier.core.types import BlockId
from kvtier.index import BlockIndex, State
from kvtier.index.selection import as_array
from kvtier.observe import Metrics
from kvtier.observe.specs import RETURN_SECONDS, RETURNED_BLOCKS

MAX_MARKED = 4096
"""Most sampled blocks that are in some tier. If there are more, half of the sample is dropped."""
MAX_GONE = 16384
"""Most sampled evicted blocks that are remembered; the oldest are dropped. A block's return is
noticed until about four times the sampled capacity has been evicted."""


class ReuseSampler:
    """Samples blocks by a hash of their names: a block is in the sample every time, or never.

    The sample begins with all blocks, and is halved each time there are too many. A block of the
    sample stands for ``weight`` blocks, a power of two. The name of a block is the engine's key, or
    the block's tokens if there is no key: blocks of equal tokens count as one.

    Cost: 0.1 to 0.3 microseconds per block that is computed, loaded or evicted; nothing for a
    look-up. Memory: at most two megabytes.
    """

    def __init__(self, index: BlockIndex, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._index = index
        self._metrics = metrics
        self._clock = clock
        self._mask = 0
        self._marks: dict[BlockId, int] = {}
        self._gone: OrderedDict[tuple[str, int], float] = OrderedDict()

    @property
    def weight(self) -> int:
        """Number of blocks that one sampled block stands for."""
        return self._mask + 1

    def on_admit(self, hashes: Iterable[int], blocks: Sequence[BlockId]) -> None:
        """Note blocks that a request needed, and that are now computed or loaded for it.

        hashes: of their names; equal names have equal ones.
        """
        its = np.asarray(hashes if isinstance(hashes, Sequence) else list(hashes), np.int64)
        chosen = np.flatnonzero((its & self._mask) == 0)
        if len(chosen):
            self.on_admit_sampled(its[chosen].tolist(), as_array(blocks)[chosen].tolist())

    def on_admit_sampled(self, hashes: Sequence[int], blocks: Sequence[BlockId]) -> None:
        """Like ``on_admit``, for blocks of the sample."""
        self._marks.update(zip(blocks, hashes, strict=True))
        if self._gone:
            self._note_returns(hashes)
        while len(self._marks) > MAX_MARKED:
            self._halve()

    def _note_returns(self, marks: Sequence[int]) -> None:
        now = self._clock()
        for tier in self._index.tiers:
            left = [self._gone.pop((tier, mark), None) for mark in marks]
            ages_s = [now - left_s for left_s in left if left_s is not None]
            if not ages_s:
                continue
            num_blocks = self.weight * len(ages_s)
            self._metrics.count(RETURNED_BLOCKS, num_blocks, tier=tier)
            for age_s in ages_s:
                self._metrics.observe(RETURN_SECONDS, age_s, tier=tier)

    def on_evict(self, blocks: Sequence[BlockId], tier: str) -> None:
        """Note blocks that are evicted from ``tier``."""
        marks, now = self._marks, self._clock()
        leaving = as_array(blocks).tolist()
        if marks.keys().isdisjoint(leaving):  # as usual, and several times as fast as a loop
            return
        chosen = [block for block in leaving if block in marks]
        for block in chosen:
            self._gone.pop((tier, marks[block]), None)
            self._gone[tier, marks[block]] = now
        for block, is_elsewhere in zip(chosen, self._are_elsewhere(chosen, tier), strict=True):
            if not is_elsewhere:
                del marks[block]
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def _are_elsewhere(self, blocks: Sequence[BlockId], tier: str) -> list[bool]:
        found = [False] * len(blocks)
        for other in self._index.tiers:
            if other != tier and blocks:
                states = self._index.states_of(blocks, other)
                found = [
                    is_there or state is not State.ABSENT
                    for is_there, state in zip(found, states, strict=True)
                ]
        return found

    def _halve(self) -> None:
        self._mask = 2 * self._mask + 1
        mask = self._mask
        self._marks = {block: mark for block, mark in self._marks.items() if not mark & mask}
        kept = ((at, left_s) for at, left_s in self._gone.items() if not at[1] & mask)
        self._gone = OrderedDict(kept)

    def forget(self) -> None:
        """Forget all blocks, after the tiers were cleared."""
        self._marks.clear()
        self._gone.clear()
