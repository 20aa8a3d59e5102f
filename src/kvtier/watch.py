"""What a waiting request waits for: it is looked at again when that has come, and not before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.transfer import Transfer, Waiter
from kvtier.types import BlockId


class Watch(Waiter):
    """Over when nothing that was on its way into memory is so any more, or some of it failed.

    num_stores: blocks that the engine is about to copy into memory itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_stores = 0
        self._is_broken = False

    @property
    def is_over(self) -> bool:
        return self._is_broken or (self.ready and not self.num_stores)

    def take(self, transfer: Transfer, now: float) -> None:
        """Nothing is held: another look says what there is."""

    def failed(self, transfer: Transfer) -> None:
        self._is_broken = True
        self.forget_transfers()


class StoreWatches:
    """Who watches blocks that the engine copies into memory itself: no transfer tells of them."""

    def __init__(self) -> None:
        self._watches: dict[BlockId, list[Watch]] = {}

    def add(self, watch: Watch, blocks: Iterable[BlockId]) -> None:
        """``watch`` is not over before the stores of these blocks have ended."""
        for block in blocks:
            self._watches.setdefault(block, []).append(watch)
            watch.num_stores += 1

    def ended(self, blocks: Sequence[BlockId]) -> None:
        """The stores of these blocks have ended, well or not."""
        for block in blocks if self._watches else ():
            for watch in self._watches.pop(block, ()):
                watch.num_stores -= 1
