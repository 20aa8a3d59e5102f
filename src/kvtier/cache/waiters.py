"""Waiters that end the waits of requests for blocks; ``plan.decide`` has the waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.cache.transfer import Transfer, Waiter
from kvtier.core.types import BlockId


@dataclass(slots=True, eq=False)
class Signal:
    """Flag that ends a wait. Its owner sets ``is_over``."""

    is_over: bool = False


class StorageWaiter(Waiter):
    """Waiter that is over when none of its blocks is in flight to memory, or one has failed.

    waits_for_store: whether it waits for a block that the engine copies into memory itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits_for_store = False
        self._is_broken = False

    @property
    def is_over(self) -> bool:
        return self._is_broken or (self.ready and not self.waits_for_store)

    def take(self, transfer: Transfer, now: float) -> None:
        """Do nothing: the request is looked up again afterwards."""

    def failed(self, transfer: Transfer) -> None:
        self._is_broken = True
        self.forget_transfers()


class StorageWaiters:
    """Waiters for blocks that the engine itself copies into memory, which no transfer reports.

    A waiter is registered for one block, the last of its prompt, which usually arrives last. So a
    store of any other block costs nothing, even if hundreds of requests wait for the same prompt.
    """

    def __init__(self) -> None:
        self._waiters: dict[BlockId, list[StorageWaiter]] = {}

    @property
    def has_any(self) -> bool:
        """Whether any waiter is registered."""
        return bool(self._waiters)

    def add(self, waiter: StorageWaiter, block: BlockId) -> None:
        """Keep ``waiter`` waiting until the store of ``block`` has ended."""
        self._waiters.setdefault(block, []).append(waiter)
        waiter.waits_for_store = True

    def ended(self, blocks: Sequence[BlockId]) -> None:
        """Note that the stores of these blocks have ended, successfully or not."""
        for block in blocks if self._waiters else ():
            for waiter in self._waiters.pop(block, ()):
                waiter.waits_for_store = False
