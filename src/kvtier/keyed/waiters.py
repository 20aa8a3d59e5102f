"""Waiters of requests: a request is looked at again when what it waits for has arrived."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.transfer import Transfer, Waiter
from kvtier.types import BlockId


class StorageWaiter(Waiter):
    """Over when what was on its way into memory is so no more, or some of it failed.

    waits_for_store: of a block that the engine copies into memory itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits_for_store = False
        self._is_broken = False

    @property
    def is_over(self) -> bool:
        return self._is_broken or (self.ready and not self.waits_for_store)

    def take(self, transfer: Transfer, now: float) -> None:
        """Nothing is held: another look says what there is."""

    def failed(self, transfer: Transfer) -> None:
        self._is_broken = True
        self.forget_transfers()


class StorageWaiters:
    """Waiters for blocks that the engine itself copies into memory, which no transfer reports.

    A watch is on one block, the last of its prompt, which mostly comes last: where hundreds wait
    for the same prompt, each piece of it that is stored concerns nobody.
    """

    def __init__(self) -> None:
        self._watches: dict[BlockId, list[StorageWaiter]] = {}

    def add(self, watch: StorageWaiter, block: BlockId) -> None:
        """``watch`` is not over before the store of ``block`` has ended."""
        self._watches.setdefault(block, []).append(watch)
        watch.waits_for_store = True

    def ended(self, blocks: Sequence[BlockId]) -> None:
        """The stores of these blocks have ended, well or not."""
        for block in blocks if self._watches else ():
            for watch in self._watches.pop(block, ()):
                watch.waits_for_store = False
