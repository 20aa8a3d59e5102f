"""Stores towards lower tiers, as far as blocks are worth their room and room is found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.grouping import has
from kvtier.index import BlockIndex, State
from kvtier.ladder.eviction import Eviction
from kvtier.ladder.topology import Topology
from kvtier.ladder.transfers import Transfers
from kvtier.plan import Copy
from kvtier.telemetry import Metrics
from kvtier.transfer import Waiter
from kvtier.types import BlockId

STORABLE = (State.READY, State.EVICTING)
"""States in which a block's bytes can be copied to the tier below."""

STORE_BLOCKS = 2048
"""In one copy at most: a poll finishes each at once."""


class Stored(NamedTuple):
    """num_there: how many of the first blocks are in the tier below now, or on their way.
    is_left_out: others were not worth what would have left for them."""

    num_there: int
    is_left_out: bool


class Stores:
    """Copies away from the fastest tier."""

    def __init__(
        self,
        row: Topology,
        index: BlockIndex,
        traffic: Transfers,
        space: Eviction,
        metrics: Metrics,
    ) -> None:
        self._row = row
        self._index = index
        self._traffic = traffic
        self._space = space
        self._metrics = metrics

    def store(
        self,
        blocks: Sequence[BlockId],
        src: str,
        num_there: int = 0,
        waiter: Waiter | None = None,
    ) -> Stored:
        """Copy blocks one memory tier down where they are not there yet.

        blocks: consecutive, in prompt order. num_there: how many of the first ones were there after
        the last call, to spare looking at them again. waiter: is told when they have arrived.
        """
        dst = self._row.below(src)
        if dst is None:
            return Stored(0, False)
        if num_there and self._index.state(blocks[num_there - 1], dst) is State.ABSENT:
            num_there = 0  # evicted meanwhile
        there = self._index.states_of(blocks[num_there:], dst)
        if not has(there, State.ABSENT):
            return Stored(len(blocks), False)
        here = self._index.states_of(blocks[num_there:], src)
        missing = [
            at
            for at, (below, above) in enumerate(zip(there, here, strict=True), num_there)
            if below is State.ABSENT and above in STORABLE
        ]
        wanted = [blocks[at] for at in missing]
        admitted, num_begun = self.copy_down(wanted, src, dst, waiter)
        if num_begun == len(wanted):
            return Stored(len(blocks), False)
        begun = set(admitted[:num_begun])
        first = next(at for at, block in zip(missing, wanted, strict=True) if block not in begun)
        return Stored(first, len(admitted) < len(wanted))

    def copy_down(
        self, blocks: Sequence[BlockId], src: str, dst: str, waiter: Waiter | None = None
    ) -> tuple[Sequence[BlockId], int]:
        """Begin to copy those of ``blocks`` that are worth their room, as many as find some.
        Returns these, and how many of the first of them."""
        if not blocks:
            return blocks, 0
        admitted = self._space.make_for(blocks, dst)
        room = self._row.rooms[dst]
        slots = room.allocate(min(len(admitted), room.num_free)) or []
        for at in range(0, len(slots), STORE_BLOCKS):
            end = min(at + STORE_BLOCKS, len(slots))
            transfer = self._traffic.begin(Copy(src, dst, admitted[at:end]), slots[at:end])
            if waiter is not None:
                waiter.wait_for(transfer)
        self.count_refused(len(admitted) - len(slots), dst)
        return admitted, len(slots)

    def count_refused(self, num_blocks: int, tier: str) -> None:
        """So many found no room."""
        if num_blocks:
            self._metrics.count("kvtier_refused_blocks_total", num_blocks, tier=tier)

    def demote(
        self, leaving: Sequence[BlockId], patience_s: float
    ) -> tuple[Sequence[BlockId], list[Sequence[BlockId]]]:
        """Copy blocks that are being evicted from the fastest tier one down, and wait. Returns
        those that may go, and what has arrived below, copy by copy.

        Blocks nearest to the root are worth most, and go first where there is not room for all.
        """
        src = self._row.fastest
        before = len(self._traffic.transfers)
        self.store(leaving[::-1], src)
        stored: list[Sequence[BlockId]] = []
        for transfer in self._traffic.newest(len(self._traffic.transfers) - before):
            assert transfer.job is not None
            if transfer.job.wait(patience_s):
                self._traffic.finish(transfer)
                stored.append(transfer.blocks)
                continue
            for block in transfer.blocks:  # still being read: it has to stay
                self._index.keep(block, src)
            self._index.lease(transfer.blocks, src)
            transfer.holds_source = True
            staying = set(transfer.blocks)
            leaving = [block for block in leaving if block not in staying]
        return leaving, stored
