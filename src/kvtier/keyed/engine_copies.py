"""Copies that an engine makes itself between its device and memory, outside the ladder's transfers.

reserve --> the engine copies to memory --> commit, or abort
hold --> the engine copies from memory --> release
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from kvtier.index import KeyIndex, State
from kvtier.keyed.waiters import StorageWaiter, StorageWaiters
from kvtier.ladder import Ladder
from kvtier.types import BlockId, Slot


class EngineCopies:
    """Copies that an engine makes between the device and the ladder's fastest tier.

    Owned by one thread.

    A reserved block is being written by one copy. A held block is ready, and leased once per hold.
    After the cache was cleared, an engine may end copies that are no longer known; they are
    skipped.
    """

    def __init__(self, index: KeyIndex, ladder: Ladder) -> None:
        self._index = index
        self._ladder = ladder
        self._memory = ladder.fastest
        self._by_slot: dict[Slot, BlockId] = {}  # reserved and held blocks
        self._reserved: set[BlockId] = set()
        self._held: Counter[BlockId] = Counter()
        self._doubted: set[BlockId] = set()
        self._waiters = StorageWaiters()

    @property
    def doubted(self) -> Collection[BlockId]:
        """Reserved blocks whose copy has failed, until its end is reported."""
        return self._doubted

    # -- to memory ---------------------------------------------------------------------------------

    def reserve(self, blocks: Sequence[BlockId], slots: Sequence[Slot]) -> None:
        """Note that the engine is about to copy new blocks into ``slots``."""
        self._index.begin_write_all(blocks, self._memory, slots)
        self._by_slot.update(zip(slots, blocks, strict=True))
        self._reserved.update(blocks)

    def commit(
        self, blocks: Sequence[BlockId | None], depths: Sequence[int], now: float
    ) -> list[BlockId]:
        """Note that copies to blocks, in prompt order, have ended.

        Returns the blocks that are in memory now; doubted ones are not.

        depths: position of each block in its prompt.
        """
        depth_of = {
            block: depth
            for block, depth in zip(blocks, depths, strict=True)
            if block is not None and block in self._reserved
        }
        kept = [block for block in depth_of if block not in self._doubted]
        self._index.set_depths(kept, [depth_of[block] for block in kept])
        self._index.commit_all(kept[::-1], self._memory, now)
        self._end(kept)
        self.abort([block for block in depth_of if block in self._doubted])
        return kept

    def abort(self, blocks: Iterable[BlockId | None]) -> None:
        """Give up blocks that were not copied into their slots, and free the slots."""
        mine = [block for block in blocks if block is not None and block in self._reserved]
        self._end(mine)
        self._doubted.difference_update(mine)
        self._ladder.eviction.give_back(self._index.abort_all(mine, self._memory))

    def _end(self, blocks: Sequence[BlockId]) -> None:
        """Forget copies that have ended, and notify their waiters."""
        for slot in self._index.slots(blocks, self._memory):
            del self._by_slot[slot]
        self._reserved.difference_update(blocks)
        self._waiters.ended(blocks)

    def keep_waiting(self, waiter: StorageWaiter, coming: Sequence[BlockId]) -> list[BlockId]:
        """Keep ``waiter`` waiting until the last reserved block of ``coming`` has been copied.

        Returns those of ``coming`` that are not reserved.

        coming: blocks in flight to memory, in prompt order.
        """
        moving = [block for block in coming if block not in self._reserved]
        if len(moving) < len(coming):
            self._waiters.add(waiter, next(b for b in reversed(coming) if b in self._reserved))
        return moving

    # -- from memory -------------------------------------------------------------------------------

    def hold(self, blocks: Sequence[BlockId]) -> Sequence[Slot]:
        """Return the slots of blocks in memory, to copy from. They are held until ``release``."""
        self._index.lease(blocks, self._memory)
        self._held.update(blocks)
        slots = self._index.slots(blocks, self._memory)
        self._by_slot.update(zip(slots, blocks, strict=True))
        return slots

    def release(self, blocks: Iterable[BlockId | None]) -> Sequence[Slot]:
        """Release blocks whose copies have ended. Return the slots of those that were held."""
        mine = [block for block in blocks if block is not None and self._held[block]]
        slots = self._index.slots(mine, self._memory)
        self._index.release(mine, self._memory)
        self._held.subtract(mine)
        for block, slot in zip(mine, slots, strict=True):
            if not self._held[block]:
                del self._held[block]
                self._by_slot.pop(slot, None)
        self._ladder.transient_blocks.passed(mine)
        return slots

    # -- both --------------------------------------------------------------------------------------

    def distrust(self, slots: Iterable[Slot]) -> None:
        """Give up the blocks in slots for which a copy has failed."""
        self.distrust_blocks([self._by_slot[slot] for slot in slots if slot in self._by_slot])

    def distrust_blocks(self, blocks: Iterable[BlockId]) -> None:
        """Give up reserved or leased blocks for which a copy has failed."""
        for block in blocks:
            if block in self._reserved:
                self._doubted.add(block)
            else:
                self._ladder.transfers.lose([block], self._memory)

    def doubt(self, blocks: Iterable[BlockId]) -> Collection[BlockId]:
        """Give up those of the blocks that are reserved, once their copy has ended. Return them."""
        reserved = self._reserved.intersection(blocks)
        self._doubted |= reserved
        return reserved

    def clear(self) -> None:
        """End all copies. The engine must not report their end later."""
        self.release(list(self._held.elements()))
        self.abort(list(self._reserved))

    def check_invariants(self) -> None:
        """Raise AssertionError if copies, slots and the index don't agree."""
        assert self._doubted <= self._reserved, "a copy that has ended is doubted"
        assert self._reserved.isdisjoint(self._held), "copied to and from at a time"
        assert all(num > 0 for num in self._held.values()), "released more often than held"
        for kind, state in (list(self._reserved), State.WRITING), (list(self._held), State.READY):
            states = self._index.states_of(kind, self._memory)
            assert set(states) <= {state}, f"{state} was promised, and it is {set(states)}"
        both = [*self._reserved, *self._held]
        slots = zip(self._index.slots(both, self._memory), both, strict=True)
        assert self._by_slot == dict(slots), "a slot is copied from or to that is another block's"
