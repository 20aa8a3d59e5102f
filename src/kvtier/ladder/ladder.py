"""The tiers as one ladder: room in each, copies between them, what leaves when one is full."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf

from kvtier.index import BlockIndex, PromptIndex
from kvtier.ladder.admission import Admission
from kvtier.ladder.cost_metrics import CostMetrics
from kvtier.ladder.direct import Straight
from kvtier.ladder.eviction import Eviction, TellLeftOut
from kvtier.ladder.gauges import Gauges
from kvtier.ladder.loads import Loads
from kvtier.ladder.options import LadderOptions
from kvtier.ladder.prefetch import Prefetch
from kvtier.ladder.recompute_weight import RecomputeWeight
from kvtier.ladder.reuse_sampler import ReuseSampler
from kvtier.ladder.storage_lookup import PendingLookup, StorageLookup
from kvtier.ladder.stores import Stored, Stores
from kvtier.ladder.topology import Topology
from kvtier.ladder.transfers import OnChange, Transfers
from kvtier.ladder.transient_blocks import TransientBlocks
from kvtier.ladder.write_queues import WriteQueues
from kvtier.plan import Copy, CostModel, Costs, patience_s
from kvtier.telemetry import Metrics
from kvtier.tiers import Room
from kvtier.transfer import Mover, Transfer, Waiter
from kvtier.types import BlockId, BlockKey, Label, Match, Slot


class Ladder:
    """Slots, residencies and copies, kept in step.

    index: of the tiers in memory and then of those in storage, fastest first; shared with whoever
    looks blocks up. rooms: of these tiers. Storage is read into the slowest memory tier, or
    straight into the fastest one, and written from the slowest; several storage tiers stand beside
    each other. mover: does what is decided here. device: memory above the fastest tier, where
    an engine copies to it and from it by itself. metrics: of its own where there are none.
    """

    def __init__(
        self,
        index: BlockIndex,
        rooms: Mapping[str, Room],
        mover: Mover,
        *,
        options: LadderOptions,
        clock: Callable[[], float],
        device: str | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.metrics = metrics if metrics is not None else Metrics()
        self.archives = True
        """Whether anything is written to storage; what would be waits, as long as it stays."""
        self._index = index
        self._mover = mover
        self._options = options
        self._row = row = Topology(rooms, mover.storages, device)
        self._traffic = Transfers(row, index, mover, self.metrics, clock)
        self._gauges = Gauges(row, self._traffic, mover, self.metrics, clock)
        self.returns = ReuseSampler(index, self.metrics, clock)
        """Told of blocks that were computed, or are to be loaded."""
        demotes = options.demotes and row.below(row.fastest) is not None
        demote = self._demote if demotes else None
        self._lines = WriteQueues(row, index, self.metrics, options, self._begin_write, clock)
        self.passage = TransientBlocks(row, index, self._traffic, self._lines)
        """Told of what comes to the fastest tier only on its way, by those who bring it there."""
        self.admission = Admission(
            row, index, self.passage, self._lines.least_chance, lambda: self.archives
        )
        """Says what is let into the fastest tier, to those who ask for room there by keys."""
        self._space = Eviction(
            row,
            index,
            mover,
            self._traffic,
            self.metrics,
            self.returns,
            self.admission,
            self.passage,
            demote,
        )
        self._stores = Stores(row, index, self._traffic, self._space, self.metrics)
        self._recall = StorageLookup(
            row,
            index,
            mover,
            self._traffic,
            self._space,
            options.lookup_patience_s,
            self._computing_s,
            self.metrics,
            clock,
        )
        self._loads = Loads(
            row, index, mover, self._traffic, self._space, self.admission, options.piece_blocks
        )
        self.straight = Straight(row, mover, self._loads)
        """Reads from storage to an engine's own memory."""
        size = options.block_size
        self._depths = RecomputeWeight(index, self.costs, size) if size else None

    def listen(self, on_change: OnChange) -> None:
        """Somebody wants to know what comes and goes."""
        self._traffic.on_change = on_change

    def tell_of_left_out(self, tell: TellLeftOut) -> None:
        """Somebody wants to know what is not copied to a tier, for it is not worth its room."""
        self._space.tell_left_out = tell

    def tell_of_ends(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` when a ``poll`` has something to do, on a thread of the mover's: for owners
        that sleep meanwhile."""
        self._traffic.tell_of_ends(tell)

    @property
    def fastest(self) -> str:
        """The tier that an engine computes in, or copies from and to."""
        return self._row.fastest

    @property
    def storages(self) -> list[str]:
        """The storage tiers, fastest first."""
        return self._row.storages

    # -- room -------------------------------------------------------------------------------------

    def num_available(self, tier: str) -> int:
        """Slots of ``tier`` that are free or could be had by eviction. An upper bound."""
        return self._space.num_available(tier)

    @property
    def num_staging_slots(self) -> int | None:
        """Blocks that could be brought from storage at a time: room for them on their way. None
        where they need none, or can do without."""
        return self._space.num_staging

    def allocate(self, num_slots: int) -> Sequence[Slot] | None:
        """Slots of the fastest tier, neighbours if possible, after evicting what has to go; None
        when that is not enough."""
        return self._space.allocate(num_slots)

    def reserve(
        self, num_slots: int, but_not: Sequence[BlockId], admit: Callable[[], int]
    ) -> Sequence[Slot] | None:
        """Slots of the fastest tier for an engine that fills them itself, after evicting others
        than ``but_not``; None where there are too few, and nothing left then.

        admit: how many of them are worth their room; not called where so many are free.
        """
        return self._space.reserve(num_slots, but_not, admit)

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Slots of the fastest tier that were handed out, and no block came to be in."""
        self._row.rooms[self.fastest].free(slots)

    def make_room(self, tier: str, num_blocks: int) -> int:
        """Evict up to ``num_blocks`` blocks from ``tier``, leaves first. Returns how many left."""
        return self._space.make(tier, num_blocks)

    def lose(self, block: BlockId, tier: str) -> None:
        """Drop the damaged copy of a block in ``tier`` as soon as no lease holds it."""
        self._traffic.lose([block], tier)

    @property
    def lost(self) -> Collection[tuple[BlockId, str]]:
        """Blocks, each with its tier, that are to go and that somebody holds still."""
        return self._traffic.lost

    def drop_lost(self) -> None:
        """Somebody has let go of blocks: those that were lost go now."""
        self._traffic.drop_lost()

    def clear(self) -> None:
        """Forget every block that nobody holds, in storage as well and for good. What is on its way
        arrives nowhere."""
        self._traffic.void()
        self._recall.forget()
        self._lines.clear()
        self._space.clear()

    # -- copies -----------------------------------------------------------------------------------

    def load(self, copy: Copy, dst_slots: Sequence[Slot]) -> None:
        """Begin a plan's copy to the fastest tier, from tier to tier and in pieces, so that one is
        read while another is copied on."""
        self._loads.load(copy, dst_slots)

    def promote(
        self, blocks: Sequence[BlockId], src: str
    ) -> list[tuple[Transfer, Sequence[BlockId]]]:
        """Begin to copy blocks one tier up, where they are not on their way there already. Returns
        the transfers with the blocks that each brings, in the order given."""
        return self._loads.promote(blocks, src)

    def fetch_ahead(self, match: Match, num_reused_blocks: int) -> None:
        """Read a piece of what was not worth waiting for, where storage has nothing else to do: the
        next request finds it in memory, and the planner learns how long a read takes now."""
        self._loads.fetch_ahead(match, num_reused_blocks)

    def prefetch(self, match: Match, deadline: float) -> Prefetch | None:
        """Begin to read what only storage has of a match, and hold it in memory together with what
        is there already. None while others hold too much of that memory."""
        return self._loads.prefetch(match, deadline)

    def end_prefetch(self, prefetch: Prefetch) -> None:
        """Hold its blocks no longer; what was not begun and nobody else wants is not read."""
        self._loads.end_prefetch(prefetch)

    def store(
        self,
        blocks: Sequence[BlockId],
        src: str,
        num_there: int = 0,
        waiter: Waiter | None = None,
    ) -> Stored:
        """Copy blocks one memory tier down where they are not there yet, as far as they are worth
        their room and find some; see ``Stores.store``."""
        return self._stores.store(blocks, src, num_there, waiter)

    # -- storage ----------------------------------------------------------------------------------

    def archive(self, blocks: Sequence[BlockId]) -> None:
        """Have blocks written to storage: those in memory that are worth a write by now."""
        self._lines.offer(blocks)
        self._write()

    def _write(self) -> None:
        if self.archives:
            self._lines.write()

    def _begin_write(self, wanted: Sequence[BlockId], storage: str) -> int:
        """Begin to write blocks that storage has not yet. Returns how many."""
        there = self._recall.were_there(wanted, storage)
        new = [block for block in wanted if block not in there] if there else wanted
        if self._mover.accepts((self._row.staging, storage)):
            return self._stores.copy_down(new, self._row.staging, storage)[1]
        self._stores.count_refused(len(new), storage)  # nothing leaves for what would not arrive
        return 0

    @property
    def has_unfound(self) -> bool:
        """Whether storage may have blocks that nobody has found yet."""
        return self._recall.has_unfound

    def recall(self, paths: PromptIndex, namespace: bytes, labels: Sequence[Label]) -> bool:
        """Take into the index what storage has kept of this prompt since an earlier life, or has
        from another process. Where it has to be asked first, that is for the next time: whether it
        is worth waiting until then."""
        return self._recall.ask(paths, namespace, labels)

    def recall_each(
        self, keys: Sequence[BlockKey], make: Callable[[Sequence[int]], Sequence[BlockId]]
    ) -> int:
        """``recall`` of single blocks, from storage that answers at once. Returns how many are
        known now.

        keys: what the blocks are called there. make: the blocks at these positions, made known.
        """
        return self._recall.ask_each(keys, make)

    @property
    def has_unfound_at_once(self) -> bool:
        """The same of storage that says at once what it has."""
        return self._recall.has_unfound_at_once

    @property
    def has_to_ask(self) -> bool:
        """Whether some storage takes its time to say what it has."""
        return self._recall.has_to_ask

    def ask_along(
        self,
        wanted: Sequence[bytes],
        names: Callable[[Sequence[bytes]], Sequence[BlockKey]],
        make: Callable[[Sequence[bytes]], Sequence[BlockId]],
        has_gaps: bool,
    ) -> list[PendingLookup]:
        """Ask that storage for blocks of one prompt that are known nowhere, in its order, piece by
        piece. Returns the questions that are worth waiting for.

        names: what keys are called in storage. make: their blocks, made known. has_gaps: where a
        block is missing those behind it may be of use.
        """
        return self._recall.ask_along(wanted, names, make, has_gaps)

    def hear(self) -> None:
        """Take in what storage that was asked has answered by now; so does every ``poll``."""
        self._recall.hear()

    def is_archiving(self, block: BlockId) -> bool:
        """Whether a block waits for its write to storage, or is being written."""
        return self._lines.has(block)

    def are_in_line(self, blocks: Sequence[BlockId | None]) -> list[bool]:
        """Return which blocks wait for their write to storage; blocks being written do not."""
        return self._lines.are_in_line(blocks)

    def poll(self) -> bool:
        """Finish the transfers whose copy is done. True if there was one. Never waits."""
        finished = self._traffic.poll()
        for transfer in finished:
            if transfer.dst in self._lines:
                self._lines.ended(transfer.dst, len(transfer.blocks))
                self.passage.passed(transfer.blocks)
            elif transfer.dst == self._row.staging and transfer.src not in self._lines:
                self._lines.offer(transfer.blocks)
            elif transfer.src == self._row.staging:
                self.passage.passed(transfer.blocks)
        self._write()
        self._recall.hear()
        self._traffic.drop_lost()
        self._traffic.scrub()
        self._gauges.refresh()
        if self._depths is not None:
            self._depths.look()
        return bool(finished)

    @property
    def is_busy(self) -> bool:
        """Something is on its way, or should be; not what is late, nor what waits behind it."""
        waits = self.archives and any(
            self._mover.accepts((self._row.staging, name)) for name in self._lines.waiting
        )
        return waits or any(not transfer.is_late for transfer in self._traffic.transfers)

    def _demote(self, leaving: Sequence[BlockId]) -> Sequence[BlockId]:
        gone, stored = self._stores.demote(leaving, self._options.patience_s)
        for blocks in stored:
            self.archive(blocks)
        return gone

    def wait_for(self, waiter: Waiter, slots: Sequence[Slot]) -> None:
        """``waiter`` is not ready before what is on its way to these slots of the fastest tier has
        arrived there. slots: of its prompt's first blocks, in order."""
        for transfer, positions in self._traffic.bringing(slots, self.fastest):
            waiter.wait_for(transfer, positions)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the oldest transfer is done, or there is none. False on time-out."""
        return self._traffic.wait(timeout_s)

    def drain(self, timeout_s: float, poll: Callable[[], object]) -> bool:
        """``poll`` until nothing is on its way. False if ``timeout_s`` was too short."""
        return self._traffic.drain(timeout_s, poll)

    # -- costs ------------------------------------------------------------------------------------

    @property
    def costs(self) -> CostModel:
        """Return the measured costs of copies and prefill."""
        return self._traffic.costs

    @property
    def account(self) -> CostMetrics:
        """To be told what was planned, what an engine's own copies and prefill took, and what was
        saved."""
        return self._traffic.account

    def cost_snapshot(self, is_free: bool = False) -> Costs:
        """Return current costs of copies and prefill, with the queued work.

        is_free: for those who want whatever there is.
        """
        return self._traffic.cost_snapshot(is_free)

    def _computing_s(self, first: int, end: int) -> float:
        """Return how long a prompt may wait before computing blocks ``first`` to ``end`` wins."""
        size = self._options.block_size
        return patience_s(self.costs.snapshot(), first * size, end * size) if size else inf

    # -- upkeep -----------------------------------------------------------------------------------

    def update_gauges(self) -> None:
        """Tell the metrics how things stand; so does a ``poll``, once a second."""
        self._gauges.update()

    def used_slots(self) -> dict[str, int]:
        """Slots in use per tier."""
        return {name: room.num_used for name, room in self._row.rooms.items()}

    def open_slots(self) -> dict[str, int]:
        """Slots per tier that can be used by now."""
        return {name: room.num_open for name, room in self._row.rooms.items()}

    def num_slots(self) -> dict[str, int]:
        """Slots in all per tier."""
        return {name: room.num_slots for name, room in self._row.rooms.items()}

    def close(self) -> set[str]:
        """Finish what is on its way. Returns the tiers that are in use all the same."""
        return self._traffic.close()

    def check_invariants(self, num_private: int) -> None:
        """Raise AssertionError where slots and blocks don't add up. num_private: slots of the
        fastest tier that requests use and the index does not know."""
        self._index.check_invariants()
        for name, in_use in self.used_slots().items():
            expected = self._index.num_held(name) + (num_private if name == self.fastest else 0)
            assert in_use == expected, f"{name}: {in_use} slots in use, {expected} accounted for"
