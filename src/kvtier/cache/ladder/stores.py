"""Copies away from the fastest tier: stores to the tier below, write-back, writes to storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.cache.ladder.eviction import Eviction
from kvtier.cache.ladder.storage_lookup import StorageLookup
from kvtier.cache.ladder.topology import Topology
from kvtier.cache.ladder.transfers import Transfers
from kvtier.cache.ladder.write_queues import WriteQueues
from kvtier.cache.transfer import Mover, Waiter
from kvtier.core.grouping import has
from kvtier.core.types import BlockId
from kvtier.index import BlockIndex, State
from kvtier.observe import Metrics
from kvtier.observe.specs import REFUSED_BLOCKS
from kvtier.plan import Copy

STORABLE = (State.READY, State.EVICTING)
"""States in which a block's bytes can be copied to the tier below."""

STORE_BLOCKS = 2048
"""Most blocks per copy, since a poll finishes a whole copy at once."""
WRITE_BLOCKS = 1024
"""Most blocks whose writes to a tier begin at a time; one piece at least."""
WRITE_SHARE = 128
"""A piece is at least 1/WRITE_SHARE of a long queue, since each piece has a fixed cost for the
cache's thread."""


class Stored(NamedTuple):
    """Result of storing blocks one tier down.

    Attributes:
        num_there: how many of the first blocks are in the tier below, or on their way to it.
        is_left_out: whether the tier did not admit others.
    """

    num_there: int
    is_left_out: bool


@dataclass(eq=False)
class Stores:
    """Copies blocks to lower tiers: from the fastest one tier down, and from memory to storage.

    A tier gets the blocks that it admits and has room for.

    piece_blocks: blocks written to storage at a time.
    patience_s: longest delay of an eviction by one copy.
    """

    topology: Topology
    index: BlockIndex
    mover: Mover
    transfers: Transfers
    eviction: Eviction
    write_queues: WriteQueues
    storage_lookup: StorageLookup
    metrics: Metrics
    piece_blocks: int
    patience_s: float

    # -- one tier down -----------------------------------------------------------------------------

    def store(
        self, blocks: Sequence[BlockId], num_there: int = 0, waiter: Waiter | None = None
    ) -> Stored:
        """Copy blocks from the fastest tier one memory tier down if they are not there yet.

        Args:
            blocks: consecutive blocks, in prompt order.
            num_there: result of the last call; these first blocks are not checked again.
            waiter: notified when the blocks have arrived.
        """
        src = self.topology.fastest
        dst = self.topology.below(src)
        if dst is None:
            return Stored(0, False)
        if num_there and self.index.state(blocks[num_there - 1], dst) is State.ABSENT:
            num_there = 0  # evicted meanwhile
        there = self.index.states_of(blocks[num_there:], dst)
        if not has(there, State.ABSENT):
            return Stored(len(blocks), False)
        here = self.index.states_of(blocks[num_there:], src)
        missing = [
            at
            for at, (below, above) in enumerate(zip(there, here, strict=True), num_there)
            if below is State.ABSENT and above in STORABLE
        ]
        wanted = [blocks[at] for at in missing]
        admitted, num_begun = self._copy_down(wanted, src, dst, waiter)
        if num_begun == len(wanted):
            return Stored(len(blocks), False)
        begun = set(admitted[:num_begun])
        first = next(at for at, block in zip(missing, wanted, strict=True) if block not in begun)
        return Stored(first, len(admitted) < len(wanted))

    def _copy_down(
        self, blocks: Sequence[BlockId], src: str, dst: str, waiter: Waiter | None = None
    ) -> tuple[Sequence[BlockId], int]:
        """Begin to copy the blocks that ``dst`` admits, as many as it has room for.

        Returns the blocks admitted, and how many of the first of these are being copied.
        """
        if not blocks:
            return blocks, 0
        admitted = self.eviction.make_for(blocks, dst)
        allocator = self.topology.allocators[dst]
        slots = allocator.allocate(min(len(admitted), allocator.num_free)) or []
        for at in range(0, len(slots), STORE_BLOCKS):
            end = min(at + STORE_BLOCKS, len(slots))
            transfer = self.transfers.begin(Copy(src, dst, admitted[at:end]), slots[at:end])
            if waiter is not None:
                waiter.wait_for(transfer)
        self._count_refused(len(admitted) - len(slots), dst)
        return admitted, len(slots)

    def _count_refused(self, num_blocks: int, tier: str) -> None:
        """Count blocks for which ``tier`` had no room."""
        if num_blocks:
            self.metrics.count(REFUSED_BLOCKS, num_blocks, tier=tier)

    def demote(self, leaving: Sequence[BlockId]) -> Sequence[BlockId]:
        """Copy ``leaving`` one tier down and wait; return the blocks that may be evicted.

        Blocks nearest to the root are worth most, and are copied first if there is not room for
        all. Blocks that have arrived below are queued for storage.
        """
        src, in_flight = self.topology.fastest, self.transfers.in_flight
        before = len(in_flight.all)
        self.store(leaving[::-1])
        stored: list[Sequence[BlockId]] = []
        for transfer in in_flight.newest(len(in_flight.all) - before):
            assert transfer.job is not None
            if transfer.job.wait(self.patience_s):
                self.transfers.finish(transfer)
                stored.append(transfer.blocks)
                continue
            self.index.keep(transfer.blocks, src)  # still being read: not to be evicted yet
            self.index.lease(transfer.blocks, src)
            transfer.holds_source = True
            staying = set(transfer.blocks)
            leaving = [block for block in leaving if block not in staying]
        for blocks in stored:
            self.enqueue_write(blocks)
        return leaving

    # -- to storage --------------------------------------------------------------------------------

    def enqueue_write(self, blocks: Sequence[BlockId]) -> None:
        """Queue those of ``blocks`` that are in memory and worth a write to storage.

        Begins what is due.
        """
        self.write_queues.offer(blocks)
        self.write()

    def write(self) -> None:
        """Begin the writes that are due. A long queue is begun in part, since an engine waits."""
        if not self.write_queues.is_open:
            return
        for queue in self.write_queues:
            piece = max(self.piece_blocks, len(queue) // WRITE_SHARE)
            left = max(piece, WRITE_BLOCKS)
            while left > 0 and (wanted := queue.take(min(piece, left))):
                left -= len(wanted)
                queue.began(self._begin(wanted, queue.storage))

    def _begin(self, wanted: Sequence[BlockId], storage: str) -> int:
        """Begin to write blocks that storage does not have yet. Return how many.

        Blocks whose copy in memory was given up are not written.
        """
        staging = self.topology.staging
        if lost := self.transfers.lost:
            wanted = [block for block in wanted if (block, staging) not in lost]
        there = self.storage_lookup.adopt(wanted, storage)
        new = [block for block in wanted if block not in there] if there else wanted
        if self.mover.accepts((staging, storage)):
            return self._copy_down(new, staging, storage)[1]
        self._count_refused(len(new), storage)  # evict nothing for a write that would fail
        return 0
