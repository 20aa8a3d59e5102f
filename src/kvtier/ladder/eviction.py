"""Room in every tier: what leaves when one is full."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.index import BlockIndex
from kvtier.ladder.admission import Admission
from kvtier.ladder.reuse_sampler import ReuseSampler
from kvtier.ladder.topology import Topology
from kvtier.ladder.transfers import Transfers
from kvtier.ladder.transient_blocks import TransientBlocks
from kvtier.telemetry import Metrics
from kvtier.transfer import Mover
from kvtier.types import BlockId, Slot, keys_of

Demote = Callable[[Sequence[BlockId]], Sequence[BlockId]]
"""Copies blocks that are to leave the fastest tier to the one below; gives those that may go."""

Admit = Callable[[], int]
"""How many slots are worth their room."""

TellLeftOut = Callable[[str, Sequence[BlockId]], object]
"""Told of blocks that are not copied to a tier, for they are not worth their room there."""


class Eviction:
    """demote: None where blocks leave the fastest tier as they leave the others."""

    def __init__(
        self,
        row: Topology,
        index: BlockIndex,
        mover: Mover,
        traffic: Transfers,
        metrics: Metrics,
        returns: ReuseSampler,
        admission: Admission,
        passage: TransientBlocks,
        demote: Demote | None,
    ) -> None:
        self._row = row
        self._index = index
        self._mover = mover
        self._traffic = traffic
        self._metrics = metrics
        self._returns = returns
        self._admission = admission
        self._passage = passage
        self._demote = demote
        self.tell_left_out: TellLeftOut | None = None
        self._told: dict[str, int] = {}  # the room of each tier, as the index knows it
        for tier in row.rooms:
            self._tell_room(tier)

    def num_available(self, tier: str) -> int:
        """Slots of ``tier`` that are free or could be had by eviction. An upper bound."""
        return self._row.rooms[tier].num_free + self._index.num_evictable(tier)

    @property
    def num_staging(self) -> int | None:
        """Slots for blocks on their way from storage, as ``num_available``. None where they need
        none, or can do without."""
        row = self._row
        if not row.is_staged or row.direct_at_need.union(row.direct).issuperset(row.storages):
            return None
        return self.num_available(row.staging)

    def allocate(self, num_slots: int) -> Sequence[Slot] | None:
        """Slots of the fastest tier, after evicting what has to go; None when that is not enough.

        Attention reads neighbours in place and gathers anything else in every step, so where a
        tier below keeps copies, more is evicted until there is a run: at most twice ``num_slots``.
        """
        tier = self._row.fastest
        room = self._row.rooms[tier]
        missing = num_slots - room.num_free
        if missing > self._index.num_evictable(tier):
            return None
        self.make(tier, missing)
        budget = 2 * num_slots if self._row.below(tier) else 0
        while budget > 0 and (short := num_slots - room.longest_run()) > 0:
            more = min(budget, max(short, num_slots // 8))
            budget -= more
            if not self.make(tier, more):
                break
        return room.allocate(num_slots)

    def reserve(
        self, num_slots: int, but_not: Sequence[BlockId], admit: Admit
    ) -> Sequence[Slot] | None:
        """Slots of the fastest tier for an engine that fills them itself, after evicting others
        than ``but_not``, as many as are worth their room; None where there are too few, and
        nothing left then."""
        tier = self._row.fastest
        room = self._row.rooms[tier]
        self._index.lease(but_not, tier)
        if num_slots > room.num_free:
            self._tell_room(tier)
            num_admitted = admit()
            self._count_left_out(num_slots - num_admitted, tier)
            num_slots = num_admitted
        missing = num_slots - room.num_free
        if missing <= self._index.num_evictable(tier):
            self.make(tier, missing)
        self._index.release(but_not, tier)
        return room.allocate(num_slots)

    def make(self, tier: str, num_blocks: int) -> int:
        """Evict up to ``num_blocks`` blocks from ``tier``, leaves first. Returns how many left."""
        if tier == self._row.staging:
            num_blocks -= self._passage.make(num_blocks)
        leaving = self._index.evict(tier, max(0, num_blocks))
        self._returns.left(leaving, tier)
        slots = self._leave(leaving, tier)
        self._row.rooms[tier].free(slots)
        if slots:
            self._metrics.count("kvtier_evicted_blocks_total", len(slots), tier=tier)
        return len(slots)

    def make_for(self, blocks: Sequence[BlockId], tier: str) -> Sequence[BlockId]:
        """Evict from ``tier`` what has to go for ``blocks``, but not the prefixes that they
        continue: the end of a prompt must not push out its beginning. Returns those of ``blocks``
        that are worth the room that they need, or a write; there may be less."""
        room = self._row.rooms[tier]
        self._tell_room(tier)
        prefixes = self._index.prefixes(blocks, tier) if len(blocks) > room.num_free else ()
        self._index.lease(prefixes, tier)
        admitted = self._admission.admit(blocks, tier)
        self.make(tier, len(admitted) - room.num_free)
        self._index.release(prefixes, tier)
        self._count_left_out(len(blocks) - len(admitted), tier)
        if self.tell_left_out is not None and len(admitted) < len(blocks):
            worth = set(admitted)
            self.tell_left_out(tier, [block for block in blocks if block not in worth])
        return admitted

    def _count_left_out(self, num_blocks: int, tier: str) -> None:
        if num_blocks:
            self._metrics.count("kvtier_unadmitted_blocks_total", num_blocks, tier=tier)

    def _tell_room(self, tier: str) -> None:
        """Follow the capacity of a tier: it grows while it opens, and may shrink."""
        room = self._row.rooms[tier]
        num_slots = max(room.num_slots, room.num_used + room.num_free)
        if self._told.get(tier) != num_slots:
            self._told[tier] = num_slots
            self._index.set_room(tier, max(1, num_slots))

    def clear(self) -> None:
        """Every block that nobody holds leaves every tier for good."""
        self._returns.forget()
        for tier, room in self._row.rooms.items():
            leaving = self._index.evict(tier, self._index.num_held(tier))
            room.free(self._leave(leaving, tier, for_good=True))
        for storage in self._row.storages:
            self._mover.drop_unfound(storage)

    def _leave(
        self, leaving: Sequence[BlockId], tier: str, for_good: bool = False
    ) -> Sequence[Slot]:
        """Blocks are being evicted. Returns the slots that are free now."""
        if self._demote is not None and tier == self._row.fastest:
            leaving = self._demote(leaving)
        if self._traffic.on_change is not None:
            self._traffic.on_change(tier, leaving, True)
        if tier == self._row.staging:
            self._passage.left(leaving)
        if leaving and tier in self._row.storages and (for_good or not self._evicts(tier)):
            keys = keys_of(self._index.names(leaving))
            self._mover.drop(tier, keys, for_good)
        return self._index.forget_all(leaving, tier)

    def _evicts(self, storage: str) -> bool:
        return self._mover.storages[storage].evicts
