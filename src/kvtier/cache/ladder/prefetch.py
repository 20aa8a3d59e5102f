"""Prefetch: read a waiting request's blocks from storage into host memory."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.cache.transfer import Transfer, Waiter
from kvtier.core.types import BlockId
from kvtier.index import BlockIndex, State

PREFETCH_SHARE = 0.5
"""Share of the free staging slots that prefetches for queued requests may hold. The rest is for
scheduled requests."""


class Prefetch(Waiter):
    """Blocks of one prompt that are held in ``tier``, or on their way to it.

    Attributes:
        tier: the memory that storage is read into.
        blocks: the blocks requested there.
        deadline: time at which the wait for them ends.
        broken: whether some did not arrive, or not in time. The others are still held.
    """

    def __init__(
        self, index: BlockIndex, tier: str, blocks: Iterable[BlockId], deadline: float
    ) -> None:
        super().__init__()
        self._index = index
        self.tier = tier
        self.blocks = frozenset(blocks)
        self.deadline = deadline
        self.broken = False
        self._held: set[BlockId] = set()
        self.hold(self.blocks)

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Lease those of ``blocks`` that are in ``tier``, so that they can't be evicted."""
        wanted = list(self.blocks.intersection(blocks) - self._held)
        states = self._index.states_of(wanted, self.tier)
        new = [block for block, at in zip(wanted, states, strict=True) if at is State.READY]
        self._index.lease(new, self.tier)
        self._held.update(new)

    def take(self, transfer: Transfer, now: float) -> None:
        self.hold(transfer.blocks)

    def failed(self, transfer: Transfer) -> None:
        self._waiting_for.discard(transfer)
        self.broken = True
        self.hold(transfer.blocks)

    def end(self) -> list[Transfer]:
        """Release all blocks, and stop waiting. Return the transfers still in flight."""
        self._index.release(list(self._held), self.tier)
        self._held.clear()
        return self.forget_transfers()
