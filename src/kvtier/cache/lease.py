"""Lease of one request: its prefix, the slots for the rest, and the copies it waits for."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvtier.cache.transfer import Transfer, Waiter
from kvtier.core.grouping import runs_of
from kvtier.core.hot import Numbers
from kvtier.core.types import DEVICE, BlockId, Label, Match, Slot
from kvtier.index import PromptIndex
from kvtier.observe import RequestRecord
from kvtier.plan import Decision


@dataclass(frozen=True, slots=True)
class PrefixStored:
    """A copy of a request's blocks to a slower memory has just ended.

    seconds: without the time in the queue. error: "" if all blocks arrived.
    """

    tier: str
    num_blocks: int
    num_bytes: int
    seconds: float
    error: str


class StoreListener(Waiter):
    """Reports the copies that store a request's blocks. The request does not wait for them.

    tell: called by the cache's thread.
    """

    def __init__(self, tell: Callable[[PrefixStored], object]) -> None:
        super().__init__()
        self._tell = tell

    def take(self, transfer: Transfer, now: float) -> None:
        self._told(transfer, "")

    def failed(self, transfer: Transfer) -> None:
        self._waiting_for.discard(transfer)
        self._told(transfer, "not all blocks arrived")

    def _told(self, transfer: Transfer, error: str) -> None:
        job = transfer.job
        assert job is not None, "it has ended"
        num = len(transfer.blocks)
        self._tell(PrefixStored(transfer.dst, num, job.num_bytes, job.seconds, error))


class Lease(Waiter):
    """Blocks of one request, in prompt order: a shared prefix, then slots of its own.

    It is ready when no copy is in flight: the prefix is on the device, or the lease is broken.

    Attributes:
        blocks: the shared prefix; ``held[i]`` is the tier in which block i can't be evicted.
        slots: device slots, ``slots[i]`` for block i: first the prefix's, then the request's own.
        num_stored: blocks of the prefix in the tier below or on their way to it, at the last look.
        is_left_out: the tier below does not admit the next blocks, nor any behind them.
        is_private: new blocks are neither shared nor stored, since the prompt was deleted.
        broken: some load failed; release the lease and fetch again.
        late: a load missed its deadline.
        decision: the inputs of its plan, as soon as there is a plan.
        stores: reports the copies that store the blocks that it has computed.
        num_ended: ``num_shared`` at the end of the lease.
        coming: transfers of a prefix that is loaded from its end, in prompt order.
        claimed: chunks of the prefix that the engine computed meanwhile, as positions of blocks.
        ring: slots of the window KV of a running sequence; empty for models without windows.
    """

    ring: Sequence[Slot] = ()

    def __init__(
        self,
        index: PromptIndex,
        namespace: bytes,
        labels: Sequence[Label],
        match: Match,
        now: float,
    ) -> None:
        super().__init__()
        self._index = index
        self.namespace = namespace
        self.labels = labels
        self.blocks = match.blocks
        self.held = list(match.tiers)
        self.slots: Sequence[Slot] = []
        self.num_stored = 0
        self.is_left_out = self.is_private = False
        self.broken = self.late = False
        self.released = False
        self.num_ended = 0
        self.started = now
        self.deadline = float("inf")
        self.record = RequestRecord(num_asked_blocks=match.num_asked)
        self.decision: Decision | None = None
        self.stores: StoreListener | None = None
        self.coming: deque[Transfer] = deque()
        self.claimed: list[range] = []
        for tier, run in runs_of(self.held):
            index.lease(match.blocks[run.start : run.stop], tier)

    @property
    def num_shared(self) -> int:
        """Blocks of the prefix; the engine must not write to their slots.

        After the end of the lease it stays as it was.
        """
        return self.num_ended if self.released else len(self.blocks)

    @property
    def hit_blocks(self) -> dict[str, int]:
        """Return the number of prefix blocks by the tier that holds them."""
        return dict(Counter(self.held))

    @property
    def start_slots(self) -> Sequence[Slot]:
        """Slots of the state to begin from, until the first commit; empty for one without."""
        return ()

    def snapshot_slots(self, num_blocks: int) -> Sequence[Slot]:
        """Return where to write the state after ``num_blocks`` blocks; empty for nowhere."""
        return ()

    def has_begun(self) -> None:
        """Note that the engine has copied what is in ``start_slots``."""
        return

    @property
    def reserved_slots(self) -> Sequence[Slot]:
        """Slots that only this request uses."""
        return self.slots[len(self.blocks) :]

    def put(self, first: int, slots: Sequence[Slot]) -> None:
        """The blocks from ``first`` on are in ``slots``."""
        behind = self.slots[first + len(slots) :]
        self.slots = Numbers.joined(self.slots[:first], slots, behind)

    def load_from_end(self) -> None:
        """Note that what the lease waits for arrives in the reverse order of the prompt."""
        self.coming.extend(sorted(self._waiting_for, key=self._first))

    def _first(self, transfer: Transfer) -> int:
        return transfer.waiters[self][0].start

    def next_chunk(self, num_blocks: int) -> tuple[Sequence[Transfer], range]:
        """Return the transfers of the first blocks that have not arrived, if they are a chunk.

        The second value is the positions from there to the last block that has not arrived. Both
        are empty if a part of the chunk has arrived, or if the lease is not loaded from its end.

        num_blocks: blocks per chunk.
        """
        coming = self.coming
        while coming and coming[0] not in self._waiting_for:
            coming.popleft()
        while coming and coming[-1] not in self._waiting_for:
            coming.pop()
        if not coming:
            return (), range(0)
        first = self._first(coming[0])
        chunk = list(takewhile(lambda each: self._first(each) < first + num_blocks, coming))
        is_whole = sum(len(each.blocks) for each in chunk) == num_blocks
        if first % num_blocks or not is_whole or not self._waiting_for.issuperset(chunk):
            return (), range(0)
        return chunk, range(first, coming[-1].waiters[self][-1].stop)

    def append(self, blocks: Sequence[BlockId], tier: str) -> None:
        """Add blocks to the end of the prefix that the caller has leased in ``tier`` already."""
        self.blocks = Numbers.joined(self.blocks, blocks)
        self.held += [tier] * len(blocks)

    def cut(self, num_blocks: int) -> None:
        """Cut the prefix to its first ``num_blocks`` blocks. Release the others."""
        assert num_blocks <= len(self.blocks), f"a prefix of {len(self.blocks)} blocks"
        self._release(range(num_blocks, len(self.blocks)))
        del self.held[num_blocks:]
        self.blocks = self.blocks[:num_blocks]

    def _release(self, positions: range) -> None:
        for tier, run in self._held_runs(positions):
            self._index.release(self.blocks[run.start : run.stop], tier)

    def take(self, transfer: Transfer, now: float) -> None:
        for positions in transfer.waiters[self]:
            for tier, run in self._held_runs(positions):
                if tier != DEVICE:
                    blocks = self.blocks[run.start : run.stop]
                    self._index.lease(blocks, DEVICE)
                    self._index.release(blocks, tier)
                    self.held[run.start : run.stop] = [DEVICE] * len(run)
                    self.record.arrivals.append((run, now - self.started))
        if self.ready:
            self.record.load_s = now - self.started

    def _held_runs(self, positions: range) -> Iterator[tuple[str, range]]:
        """Return runs of neighbours held in one tier, for one index call per run."""
        return runs_of(self.held[positions.start : positions.stop], positions.start)

    def failed(self, transfer: Transfer) -> None:
        self.give_up()

    def give_up(self, late: bool = False) -> None:
        self.broken = True
        self.late = late
        self.forget_transfers()
