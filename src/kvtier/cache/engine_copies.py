"""Copies that an engine makes itself between its device and memory, outside the ladder's transfers.

reserve --> the engine copies to memory --> commit, or abort
hold --> the engine copies from memory --> release
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from kvtier.cache.ladder import Ladder
from kvtier.cache.waiters import StorageWaiter, StorageWaiters
from kvtier.core.types import BlockId, Slot
from kvtier.index import KeyIndex, State
from kvtier.index.selection import Int64s, are_distinct, as_array, as_numbers, select


class EngineCopies:
    """Copies that an engine makes between the device and the ladder's fastest tier.

    Owned by one thread.

    A reserved block is being written by one copy. A held block is ready, and leased once per hold.
    After the cache was cleared, an engine may end copies that are no longer known; they are
    skipped.

    Args:
        index, ladder: of the cache.
        num_slots: slots of the fastest tier.

    Attributes:
        are_reserved: bool [num_slots], whether the engine is to fill each slot.
    """

    def __init__(self, index: KeyIndex, ladder: Ladder, num_slots: int) -> None:
        self._index = index
        self._ladder = ladder
        self._memory = ladder.fastest
        self.are_reserved = np.zeros(num_slots, bool)
        self._held: Counter[BlockId] = Counter()
        self._doubted: set[BlockId] = set()
        self._waiters = StorageWaiters()

    @property
    def has_waiters(self) -> bool:
        """Whether a request waits for a reserved block."""
        return self._waiters.has_any

    @property
    def doubted(self) -> Collection[BlockId]:
        """Reserved blocks whose copy has failed, until its end is reported."""
        return self._doubted

    # -- to memory ---------------------------------------------------------------------------------

    def reserve(self, slots: Sequence[Slot]) -> None:
        """Note that the engine is about to copy new blocks into ``slots``."""
        self.are_reserved[as_array(slots)] = True

    def commit(
        self, blocks: Sequence[BlockId], depths: Sequence[int], now: float
    ) -> Sequence[BlockId]:
        """Note that copies to blocks, in prompt order, have ended.

        Returns the blocks that are in memory now; doubted ones are not.

        Args:
            blocks: blocks that are being written in memory. Blocks that are not reserved are
                skipped.
            depths: position of each block in its prompt.
            now: the time.
        """
        mine, slots = self._reserved_among(blocks)
        if self._doubted:
            are_doubted = np.array([blocks[at] in self._doubted for at in mine.tolist()], bool)
            self.abort(select(blocks, mine[are_doubted]))
            mine, slots = mine[~are_doubted], slots[~are_doubted]
        if len(mine) < len(blocks):
            blocks, depths = select(blocks, mine), [depths[at] for at in mine.tolist()]
        self._index.commit_prompt(blocks, depths, self._memory, now)
        self._end(blocks, slots)
        return blocks

    def abort(self, blocks: Sequence[BlockId]) -> None:
        """Give up blocks that were not copied into their slots, and free the slots.

        blocks: see ``commit``.
        """
        mine, slots = self._reserved_among(blocks)
        if not len(mine):
            return
        blocks = select(blocks, mine)
        self._end(blocks, slots)
        self._doubted.difference_update(blocks)
        self._ladder.free(self._index.abort(blocks, self._memory))

    def _reserved_among(self, blocks: Sequence[BlockId]) -> tuple[Int64s, Int64s]:
        """Return the positions of reserved blocks, each once, and their slots.

        blocks: see ``commit``.
        """
        slots = as_array(self._index.slots(blocks, self._memory))
        mine = np.flatnonzero(self.are_reserved[slots])
        if not are_distinct(slots[mine]):
            _, first = np.unique(slots[mine], return_index=True)
            mine = mine[np.sort(first)]
        return mine, slots[mine]

    def _end(self, blocks: Sequence[BlockId], slots: Int64s) -> None:
        """Forget copies that have ended, and notify their waiters."""
        self.are_reserved[slots] = False
        self._waiters.ended(blocks)

    def keep_waiting(self, waiter: StorageWaiter, coming: Sequence[BlockId]) -> Sequence[BlockId]:
        """Keep ``waiter`` waiting until the last reserved block of ``coming`` has been copied.

        Returns those of ``coming`` that are not reserved.

        coming: blocks in flight to memory, in prompt order.
        """
        are_reserved = self.are_reserved[as_array(self._index.slots(coming, self._memory))]
        if not are_reserved.any():
            return coming
        self._waiters.add(waiter, coming[int(np.flatnonzero(are_reserved)[-1])])
        return select(coming, ~are_reserved)

    # -- from memory -------------------------------------------------------------------------------

    def hold(self, blocks: Sequence[BlockId]) -> Sequence[Slot]:
        """Return the slots of blocks in memory, to copy from. They are held until ``release``."""
        self._index.lease(blocks, self._memory)
        self._held.update(blocks)
        return self._index.slots(blocks, self._memory)

    def release(self, blocks: Sequence[BlockId]) -> Sequence[Slot]:
        """Release blocks whose copies have ended. Return the slots of the held ones among them."""
        held = self._held
        mine = [block for block in blocks if block in held]
        slots = self._index.slots(mine, self._memory)
        self._index.release(mine, self._memory)
        for block in mine:
            held[block] -= 1
            if not held[block]:
                del held[block]
        self._ladder.end_reads(mine)
        return slots

    # -- both --------------------------------------------------------------------------------------

    def distrust(self, slots: Collection[Slot]) -> None:
        """Give up the blocks in slots for which a copy has failed. Cost: O(all blocks)."""
        if not slots:
            return
        blocks = self._index.in_slots(slots, self._memory)
        used = self._are_reserved(blocks)
        self.distrust_blocks(
            [
                block
                for block, is_mine in zip(blocks, used, strict=True)
                if is_mine or block in self._held
            ]
        )

    def distrust_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Give up reserved or leased blocks for which a copy has failed."""
        mine = np.array(self._are_reserved(blocks), bool)
        self._doubted.update(select(blocks, mine))
        self._ladder.distrust(select(blocks, ~mine))

    def doubt(self, blocks: Sequence[BlockId]) -> Collection[BlockId]:
        """Give up those of the blocks that are reserved, once their copy has ended. Return them.

        blocks: see ``commit``.
        """
        mine, _ = self._reserved_among(blocks)
        reserved = set(select(blocks, mine))
        self._doubted |= reserved
        return reserved

    def _are_reserved(self, blocks: Sequence[BlockId]) -> list[bool]:
        """Return whether each block is reserved. blocks: in memory, or being written there."""
        slots = as_array(self._index.slots(blocks, self._memory))
        found: list[bool] = self.are_reserved[slots].tolist()
        return found

    def clear(self) -> None:
        """End all copies. The engine must not report their end later."""
        self.release(list(self._held.elements()))
        self.abort(self._reserved())

    def _reserved(self) -> Sequence[BlockId]:
        """Return all reserved blocks. O(all blocks)."""
        slots: Sequence[Slot] = as_numbers(np.flatnonzero(self.are_reserved))
        return self._index.in_slots(slots, self._memory) if slots else slots[:0]  # type: ignore[return-value]

    def check_invariants(self) -> None:
        """Raise AssertionError if copies, slots and the index don't agree."""
        reserved = set(self._reserved())
        assert len(reserved) == np.count_nonzero(self.are_reserved), "a reserved slot has no block"
        assert self._doubted <= reserved, "a copy that has ended is doubted"
        assert reserved.isdisjoint(self._held), "copied to and from at a time"
        assert all(num > 0 for num in self._held.values()), "released more often than held"
        for kind, state in (list(reserved), State.WRITING), (list(self._held), State.READY):
            states = self._index.states_of(kind, self._memory)
            assert set(states) <= {state}, f"{state} was promised, and it is {set(states)}"
