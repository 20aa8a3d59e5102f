"""Lease of one request: its prefix, the slots for the rest, and the copies it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtier._hot import Numbers
from kvtier.grouping import has, runs_of
from kvtier.index import PromptIndex
from kvtier.plan import Decision
from kvtier.telemetry import RequestRecord
from kvtier.transfer import Transfer, Waiter
from kvtier.types import DEVICE, BlockId, GroupMatch, Label, Match, Slot, column_of


@dataclass(frozen=True, slots=True)
class PrefixStored:
    """A copy of a request's blocks to a slower memory has ended, a moment ago.

    seconds: without the time in line. error: "" where all arrived.
    """

    tier: str
    num_blocks: int
    num_bytes: int
    seconds: float
    error: str


class StoreListener(Waiter):
    """Hears of the copies that store a request's blocks; nobody waits for them.

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
    """Blocks of one request, in prompt order: a shared prefix, then room of its own.

    Ready when nothing is on its way any more: the prefix is on the device, or the lease is broken.

    blocks: the shared prefix; ``held[group][i]`` is the tier in which a group's part of block i
    can't be evicted, None where the lease does not hold it. Before ``cut`` that is all that was
    matched, after it what the cut needs.
    slots: device slots, ``slots[i]`` for block i: first the prefix's, then the room.
    num_stored: blocks of the prefix in the tier below or on their way to it, at the last look.
    is_left_out: the next ones are not worth their room there, and what comes behind them neither.
    is_private: what the engine computes is neither shared nor stored, since the prompt was deleted.
    broken: some load failed; release the lease and ask again. late: it came too late.
    decision: what its plan was made from, as soon as there is one. stores: hears of the copies that
    store what it has computed.
    num_ended: ``num_shared`` at the end of the lease.
    ring: slots of the window KV of a running sequence; empty for models without windows.
    """

    ring: Sequence[Slot] = ()

    def __init__(
        self,
        index: PromptIndex,
        namespace: bytes,
        labels: Sequence[Label],
        match: Match | GroupMatch,
        now: float,
    ) -> None:
        super().__init__()
        self._index = index
        self.namespace = namespace
        self.labels = labels
        self.blocks = match.blocks
        self.held: list[list[str | None]] = []
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
        for group, tiers in enumerate(match.over_groups().tiers):
            self.held.append(list(tiers))
            for tier, run in self._held_runs(group, range(len(tiers))):
                index.lease(match.blocks[run.start : run.stop], column_of(tier, group))

    @property
    def num_shared(self) -> int:
        """Blocks of the prefix; the engine must not write to their slots.

        After the end of the lease it stays as it was.
        """
        return self.num_ended if self.released else len(self.blocks)

    @property
    def hit_blocks(self) -> dict[str, int]:
        """Return the number of prefix blocks by the tier that holds the first group's part."""
        found: dict[str, int] = {}
        for tier, run in self._held_runs(0, range(len(self.held[0]))):
            found[tier] = found.get(tier, 0) + len(run)
        return found

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
    def room(self) -> Sequence[Slot]:
        """Slots that only this request uses."""
        return self.slots[len(self.blocks) :]

    def put(self, first: int, slots: Sequence[Slot]) -> None:
        """The blocks from ``first`` on are in ``slots``."""
        behind = self.slots[first + len(slots) :]
        self.slots = Numbers.joined(self.slots[:first], slots, behind)

    def adopt(
        self, blocks: Sequence[BlockId], tier: str, group: int = 0, first: int | None = None
    ) -> None:
        """Take blocks into the prefix of which ``tier`` holds the group's part for it already.

        first: position of the first of them; None for behind those that it has of the group. The
        first group to reach a position says which block is there.
        """
        held = self.held[group]
        first = len(held) if first is None else first
        assert len(held) <= first <= len(self.blocks), "adopted twice, or not in prompt order"
        num_known = len(self.blocks) - first
        assert Numbers(self.blocks[first:]) == Numbers(blocks[:num_known]), (
            "blocks of another prompt"
        )
        self.blocks = Numbers.joined(self.blocks, blocks[num_known:])
        held += [None] * (first - len(held))
        held += [tier] * len(blocks)

    def cut(self, num_blocks: int) -> None:
        """Hold what a cut after ``num_blocks`` blocks needs, and let go of the rest.

        num_blocks: a possible cut of the match, or, when every group has been adopted up to there,
        one behind it; or 0.
        """
        for group, rule in enumerate(self._index.rules):
            held, needed = self.held[group], rule.needed(num_blocks)
            is_there = len(held) >= num_blocks and not has(held[needed.start : num_blocks], None)
            assert is_there, f"group {group}: no cut after {num_blocks} blocks"
            if needed.start:
                self._let_go(group, range(needed.start))
                held[: needed.start] = [None] * needed.start
            self._let_go(group, range(num_blocks, len(held)))
            del held[num_blocks:]
        self.blocks = self.blocks[:num_blocks]

    def _let_go(self, group: int, positions: range) -> None:
        """Release what the lease holds of a group at these positions."""
        for tier, run in self._held_runs(group, positions):
            self._index.release(self.blocks[run.start : run.stop], column_of(tier, group))

    def take(self, transfer: Transfer, now: float) -> None:
        group = transfer.group
        for positions in transfer.waiters[self]:
            for tier, run in self._held_runs(group, positions):
                if tier != DEVICE:
                    blocks = self.blocks[run.start : run.stop]
                    self._index.lease(blocks, column_of(DEVICE, group))
                    self._index.release(blocks, column_of(tier, group))
                    self.held[group][run.start : run.stop] = [DEVICE] * len(run)
                    if group == 0:
                        self.record.arrivals.append((run, now - self.started))
        if self.ready:
            self.record.load_s = now - self.started

    def _held_runs(self, group: int, positions: range) -> Iterator[tuple[str, range]]:
        """Return runs of neighbours held in one tier, for one index call per run."""
        held = self.held[group][positions.start : positions.stop]
        for tier, run in runs_of(held, positions.start):
            if tier is not None:
                yield tier, run

    def failed(self, transfer: Transfer) -> None:
        self.give_up()

    def give_up(self, late: bool = False) -> None:
        self.broken = True
        self.late = late
        self.forget_transfers()
