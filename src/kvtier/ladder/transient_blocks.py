"""Transient blocks: in host memory only while they pass between device and storage."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvtier.index import BlockIndex, State
from kvtier.ladder.topology import Topology
from kvtier.ladder.transfers import Transfers
from kvtier.ladder.write_queues import WriteQueues
from kvtier.types import BlockId


class TransientBlocks:
    """Tracks transient blocks of the memory tier that storage reads into and writes from.

    ``note`` marks newly arrived blocks that the policy would not admit. Once such a block has been
    written, or read by the request that needed it, it is evicted before all others. Until then it
    is evicted like any other block.
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
        self._passed: dict[BlockId, None] = {}  # in the order of eviction

    def note(self, blocks: Collection[BlockId], passing: Collection[BlockId]) -> None:
        """Note blocks that enter memory. Those in ``passing`` are transient."""
        self.on_evict(blocks)
        self._passing.update(passing)

    def on_evict(self, blocks: Collection[BlockId]) -> None:
        """Forget blocks that are evicted from memory."""
        if self._passing:
            self._passing.difference_update(blocks)
        if self._passed:
            for block in self._passed.keys() & set(blocks):
                del self._passed[block]

    def passed(self, blocks: Sequence[BlockId]) -> None:
        """Note that a copy of blocks from memory has ended.

        Transient blocks may then be evicted, unless they wait for another write to storage.
        """
        if not self._passing or self._passing.isdisjoint(blocks):
            return
        mine = [block for block in blocks if block in self._passing]
        over = [block for block in mine if not self._write_queues.has(block)]
        self._passing.difference_update(over)
        self._passed.update(dict.fromkeys(reversed(over)))

    def make(self, num_blocks: int) -> int:
        """Evict up to ``num_blocks`` transient blocks that have been copied and are not leased.

        Returns how many were evicted.
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
