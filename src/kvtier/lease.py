"""What one request holds: its prefix, the room for the rest, the copies it waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from kvtier.index import BlockIndex
from kvtier.telemetry import RequestRecord
from kvtier.transfer import Transfer, Waiter
from kvtier.types import DEVICE, BlockId, Label, Match, Slot


class Lease(Waiter):
    """Blocks of one request, in prompt order: a shared prefix, then room of its own.

    Ready when nothing is on its way any more: the prefix is on the device, or the lease is broken.

    blocks: the shared prefix; ``held_in[i]`` is the tier in which block i can't be evicted.
    slots: device slots, ``slots[i]`` for block i: first the prefix's, then the room.
    num_stored: blocks of the prefix in the tier below or on their way to it, at the last look.
    broken: some load failed; release the lease and ask again. late: it came too late.
    """

    def __init__(
        self, index: BlockIndex, namespace: bytes, labels: Sequence[Label], match: Match, now: float
    ) -> None:
        super().__init__()
        self._index = index
        self.namespace = namespace
        self.labels = labels
        self.blocks: list[BlockId] = []
        self.held_in: list[str] = []
        self.slots: list[Slot] = []
        self.num_stored = 0
        self.broken = self.late = False
        self.released = False
        self.started = now
        self.deadline = float("inf")
        self.record = RequestRecord(num_asked_blocks=match.num_asked)
        for tier, positions in _runs(match.tiers):
            self.hold(match.blocks[positions], tier)

    @property
    def num_shared(self) -> int:
        """Blocks of the prefix; the engine must not write to their slots."""
        return len(self.blocks)

    @property
    def room(self) -> list[Slot]:
        """Slots that only this request uses."""
        return self.slots[len(self.blocks) :]

    def hold(self, blocks: Sequence[BlockId], tier: str) -> None:
        """Take the next blocks into the prefix, held in ``tier``."""
        self._index.lease(blocks, tier)
        self.adopt(blocks, tier)

    def adopt(self, blocks: Sequence[BlockId], tier: str) -> None:
        """Take blocks into the prefix that are held in ``tier`` for it already."""
        self.blocks += blocks
        self.held_in += [tier] * len(blocks)

    def cut(self, num_blocks: int) -> None:
        """Let go of all but the first ``num_blocks`` of the prefix."""
        dropped = self.blocks[num_blocks:]
        for tier, positions in _runs(self.held_in[num_blocks:]):
            self._index.release(dropped[positions], tier)
        del self.blocks[num_blocks:], self.held_in[num_blocks:]

    def take(self, transfer: Transfer, now: float) -> None:
        arrived = set(transfer.blocks)
        moved = [
            position
            for position, block in enumerate(self.blocks)
            if block in arrived and self.held_in[position] != DEVICE
        ]
        self._index.lease([self.blocks[position] for position in moved], DEVICE)
        for tier, positions in _runs([self.held_in[position] for position in moved]):
            self._index.release([self.blocks[position] for position in moved[positions]], tier)
        for position in moved:
            self.held_in[position] = DEVICE
        if self.ready:
            self.record.load_s = now - self.started

    def failed(self, transfer: Transfer) -> None:
        self.give_up()

    def give_up(self, late: bool = False) -> None:
        self.broken = True
        self.late = late
        self.forget_transfers()


def _runs(tiers: Sequence[str]) -> Iterator[tuple[str, slice]]:
    """Where neighbours are in one tier: a call of the index for each run, not for each block."""
    start = 0
    for tier, run in groupby(tiers):
        end = start + sum(1 for _ in run)
        yield tier, slice(start, end)
        start = end
