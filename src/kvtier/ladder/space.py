"""Room in every tier: what leaves when one is full."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.index import BlockIndex
from kvtier.ladder.row import Row
from kvtier.ladder.traffic import Traffic
from kvtier.telemetry import Metrics
from kvtier.transfer import Mover
from kvtier.types import BlockId, Slot, keys_of

Demote = Callable[[Sequence[BlockId]], Sequence[BlockId]]
"""Copies blocks that are to leave the fastest tier to the one below; gives those that may go."""


class Space:
    """demote: None where blocks leave the fastest tier as they leave the others."""

    def __init__(
        self,
        row: Row,
        index: BlockIndex,
        mover: Mover,
        traffic: Traffic,
        metrics: Metrics,
        demote: Demote | None,
    ) -> None:
        self._row = row
        self._index = index
        self._mover = mover
        self._traffic = traffic
        self._metrics = metrics
        self._demote = demote

    def num_available(self, tier: str) -> int:
        """Slots of ``tier`` that are free or could be had by eviction. An upper bound."""
        return self._row.rooms[tier].num_free + self._index.num_evictable(tier)

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

    def reserve(self, num_slots: int, but_not: Sequence[BlockId]) -> Sequence[Slot] | None:
        """Slots of the fastest tier for an engine that fills them itself, after evicting others
        than ``but_not``; None where there are too few, and nothing left then."""
        tier = self._row.fastest
        room = self._row.rooms[tier]
        self._index.lease(but_not, tier)
        missing = num_slots - room.num_free
        if missing <= self._index.num_evictable(tier):
            self.make(tier, missing)
        self._index.release(but_not, tier)
        return room.allocate(num_slots)

    def make(self, tier: str, num_blocks: int) -> int:
        """Evict up to ``num_blocks`` blocks from ``tier``, leaves first. Returns how many left."""
        if self._leaves_unnoticed(tier):
            slots = self._index.drop(tier, num_blocks)
        else:
            slots = self._leave(self._index.evict(tier, max(0, num_blocks)), tier)
        self._row.rooms[tier].free(slots)
        if slots:
            self._metrics.count("kvtier_evicted_blocks_total", len(slots), tier=tier)
        return len(slots)

    def make_for(self, blocks: Sequence[BlockId], tier: str) -> None:
        """Evict from ``tier`` what has to go for ``blocks``, but not the prefixes that they
        continue: the end of a prompt must not push out its beginning."""
        lacking = len(blocks) - self._row.rooms[tier].num_free
        if lacking > 0:
            prefixes = self._index.prefixes(blocks, tier)
            self._index.lease(prefixes, tier)
            self.make(tier, lacking)
            self._index.release(prefixes, tier)

    def clear(self) -> None:
        """Every block that nobody holds leaves every tier for good."""
        for tier, room in self._row.rooms.items():
            leaving = self._index.evict(tier, self._index.num_held(tier))
            room.free(self._leave(leaving, tier, for_good=True))
        for storage in self._row.storages:
            self._mover.drop_unfound(storage)

    def _leaves_unnoticed(self, tier: str) -> bool:
        """What leaves ``tier`` goes nowhere, and nobody wants to know of it."""
        is_noticed = self._traffic.on_change is not None or tier in self._row.storages
        is_demoted = self._demote is not None and tier == self._row.fastest
        return not is_noticed and not is_demoted

    def _leave(
        self, leaving: Sequence[BlockId], tier: str, for_good: bool = False
    ) -> Sequence[Slot]:
        """Blocks are being evicted. Returns the slots that are free now."""
        if self._demote is not None and tier == self._row.fastest:
            leaving = self._demote(leaving)
        if self._traffic.on_change is not None:
            self._traffic.on_change(tier, leaving, True)
        if leaving and tier in self._row.storages and (for_good or not self._evicts(tier)):
            keys = keys_of(self._index.names(leaving))
            self._mover.drop(tier, keys, for_good)
        return self._index.forget_all(leaving, tier)

    def _evicts(self, storage: str) -> bool:
        return self._mover.storages[storage].evicts
