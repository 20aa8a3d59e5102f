"""Blocks that are in memory on their way only: they leave first, when they have passed on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvtier.index import BlockIndex, State
from kvtier.ladder.topology import Topology
from kvtier.ladder.transfers import Transfers
from kvtier.ladder.write_queues import WriteQueues
from kvtier.types import BlockId


class TransientBlocks:
    """Tracks transient blocks of the memory tier that storage reads into and writes from.

    ``note`` marks newly arrived blocks that the policy would not admit. They are evicted before all
    others once they have been written, or read by the request that wanted them; one that never is,
    is evicted like any other block. So transient blocks take as much room as they need at a time,
    and evict nothing else.
    """

    def __init__(
        self, topology: Topology, index: BlockIndex, transfers: Transfers, write_queues: WriteQueues
    ) -> None:
        self._memory = topology.staging
        self._room = topology.rooms[topology.staging]
        self._index = index
        self._transfers = transfers
        self._write_queues = write_queues
        self._passing: set[BlockId] = set()
        self._passed: dict[BlockId, None] = {}  # in the order in which they leave

    def note(self, blocks: Collection[BlockId], passing: Collection[BlockId]) -> None:
        """``blocks`` come to memory; those of them that are ``passing`` are not to stay."""
        self.left(blocks)
        self._passing.update(passing)

    def left(self, blocks: Collection[BlockId]) -> None:
        """Blocks have left memory for others."""
        if self._passing:
            self._passing.difference_update(blocks)
        if self._passed:
            for block in self._passed.keys() & set(blocks):
                del self._passed[block]

    def passed(self, blocks: Sequence[BlockId]) -> None:
        """A copy from memory has ended.

        Those that were to pass may leave, unless some storage is to have them still.
        """
        if self._passing.isdisjoint(blocks):
            return
        mine = [block for block in blocks if block in self._passing]
        over = [block for block in mine if not self._write_queues.has(block)]
        self._passing.difference_update(over)
        self._passed.update(dict.fromkeys(reversed(over)))

    def make(self, num_blocks: int) -> int:
        """Up to so many of those that have passed leave, but for those that somebody holds.

        Returns how many.
        """
        gone: list[BlockId] = []
        while self._passed and len(gone) < num_blocks:
            block = next(iter(self._passed))
            del self._passed[block]
            is_ready = self._index.state(block, self._memory) is State.READY
            if is_ready and not self._index.num_leases(block, self._memory):
                gone.append(block)
        if gone and self._transfers.on_change is not None:
            self._transfers.on_change(self._memory, gone, True)
        slots = [self._index.lose(block, self._memory) for block in gone]
        self._room.free([slot for slot in slots if slot is not None])
        return len(gone)
