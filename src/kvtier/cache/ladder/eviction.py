"""Allocation of slots in every tier, and eviction from full tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.cache.ladder.admission import Admission, TransientBlocks
from kvtier.cache.ladder.reuse_sampler import ReuseSampler
from kvtier.cache.ladder.topology import Topology
from kvtier.cache.ladder.transfers import Transfers
from kvtier.cache.transfer import Mover
from kvtier.core.types import BlockId, Slot, keys_of
from kvtier.index import BlockIndex, State
from kvtier.observe import Metrics
from kvtier.observe.specs import EVICTED_BLOCKS, UNADMITTED_BLOCKS

Admit = Callable[[], int]
"""Return the number of blocks that the policy admits."""

Demote = Callable[[Sequence[BlockId]], Sequence[BlockId]]
"""Copy blocks to the tier below; return the ones that may be evicted now."""


@dataclass(eq=False)
class Eviction:
    """Allocates slots, and evicts blocks if too few are free.

    on_left_out: see ``LadderCallbacks``.
    demote: called with the blocks to evict from the fastest tier; None if they are not copied.
    """

    topology: Topology
    index: BlockIndex
    mover: Mover
    transfers: Transfers
    metrics: Metrics
    reuse_sampler: ReuseSampler
    admission: Admission
    transient_blocks: TransientBlocks
    on_left_out: Callable[[str, Sequence[BlockId]], object] | None
    demote: Demote | None
    # the room of each tier, as the index knows it
    _told: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for tier in self.topology.allocators:
            self._tell_room(tier)

    def num_available(self, tier: str) -> int:
        """Return the slots of ``tier`` that are free or could be freed by eviction.

        An upper bound.
        """
        return self.topology.allocators[tier].num_free + self.index.num_evictable(tier)

    def allocate(self, num_slots: int, as_neighbours: bool = True) -> Sequence[Slot] | None:
        """Allocate slots of the fastest tier, evicting as needed. None if that is not enough.

        Attention reads consecutive slots in place and gathers any others in every step. So if a
        tier below keeps copies, more blocks are evicted to get consecutive slots: at most twice
        ``num_slots``.

        as_neighbours: False for slots that attention does not read.
        """
        tier = self.topology.fastest
        allocator = self.topology.allocators[tier]
        missing = num_slots - allocator.num_free
        if missing > self.index.num_evictable(tier):
            return None
        self.make(tier, missing)
        budget = 2 * num_slots if as_neighbours and self.topology.below(tier) else 0
        while budget > 0 and (short := num_slots - allocator.longest_run()) > 0:
            more = min(budget, max(short, num_slots // 8))
            budget -= more
            if not self.make(tier, more):
                break
        return allocator.allocate(num_slots)

    def reserve(
        self, num_slots: int, but_not: Sequence[BlockId], admit: Admit
    ) -> Sequence[Slot] | None:
        """Reserve slots of the fastest tier that an engine fills itself. None if there are too few.

        Nothing is evicted if the reservation fails.

        Args:
            num_slots: slots to reserve if the tier has that many free ones.
            but_not: blocks that must not be evicted.
            admit: called otherwise; returns how many blocks are worth evicting others for.
        """
        num_admitted = self.make_room(num_slots, but_not, admit)
        return self.topology.allocators[self.topology.fastest].allocate(num_admitted)

    def make_room(
        self, num_slots: int, but_not: Sequence[BlockId], admit: Admit, is_partial: bool = True
    ) -> int:
        """Evict blocks of the fastest tier as ``reserve`` does. Return how many are admitted.

        is_partial: whether blocks are also evicted if only a part is admitted.
        """
        tier = self.topology.fastest
        allocator = self.topology.allocators[tier]
        self._tell_room(tier)
        if num_slots <= allocator.num_free:
            return num_slots
        self.index.lease(but_not, tier)
        num_admitted = admit()
        if is_partial or num_admitted == num_slots:
            self._count_left_out(num_slots - num_admitted, tier)
            missing = num_admitted - allocator.num_free
            if 0 < missing <= self.index.num_evictable(tier):
                self.make(tier, missing)
        self.index.release(but_not, tier)
        return num_admitted

    def make(self, tier: str, num_blocks: int) -> int:
        """Evict up to ``num_blocks`` blocks from ``tier``. Return how many were evicted."""
        if tier == self.topology.staging:
            num_blocks -= self.transient_blocks.make(num_blocks)
        leaving = self.index.evict(tier, max(0, num_blocks))
        self.reuse_sampler.on_evict(leaving, tier)
        slots = self._leave(leaving, tier)
        self.topology.allocators[tier].free(slots)
        if slots:
            self.metrics.count(EVICTED_BLOCKS, len(slots), tier=tier)
        return len(slots)

    def make_for(self, blocks: Sequence[BlockId], tier: str) -> Sequence[BlockId]:
        """Evict blocks from ``tier`` to make room for ``blocks``. Return the blocks admitted.

        The prefixes of ``blocks`` are not evicted: the end of a prompt must not push out its
        beginning. There may be less room than blocks admitted.
        """
        allocator = self.topology.allocators[tier]
        self._tell_room(tier)
        prefixes = self.index.prefixes(blocks, tier) if len(blocks) > allocator.num_free else ()
        self.index.lease(prefixes, tier)
        admitted = self.admission.admit(blocks, tier)
        self.make(tier, len(admitted) - allocator.num_free)
        self.index.release(prefixes, tier)
        self._count_left_out(len(blocks) - len(admitted), tier)
        if self.on_left_out is not None and len(admitted) < len(blocks):
            worth = set(admitted)
            self.on_left_out(tier, [block for block in blocks if block not in worth])
        return admitted

    def _count_left_out(self, num_blocks: int, tier: str) -> None:
        if num_blocks:
            self.metrics.count(UNADMITTED_BLOCKS, num_blocks, tier=tier)

    def _tell_room(self, tier: str) -> None:
        """Report a tier's capacity to the index. It grows while the tier opens, and may shrink."""
        allocator = self.topology.allocators[tier]
        num_slots = max(allocator.capacity, allocator.num_used + allocator.num_free)
        if self._told.get(tier) != num_slots:
            self._told[tier] = num_slots
            self.index.set_room(tier, max(1, num_slots))

    def remove(self, blocks: Sequence[BlockId], tier: str) -> Sequence[BlockId]:
        """Evict these blocks from ``tier``, if ready and not leased. Return those evicted."""
        states = self.index.states_of(blocks, tier)
        ready = [block for block, at in zip(blocks, states, strict=True) if at is State.READY]
        leaving = [block for block in ready if not self.index.num_leases(block, tier)]
        self.reuse_sampler.on_evict(leaving, tier)
        if tier == self.topology.staging:
            self.transient_blocks.on_evict(leaving)
        self.transfers.report(tier, leaving, is_removed=True)
        slots = [self.index.lose(block, tier) for block in leaving]
        self.topology.allocators[tier].free([slot for slot in slots if slot is not None])
        if leaving:
            self.metrics.count(EVICTED_BLOCKS, len(leaving), tier=tier)
        return leaving

    def delete(self, tier: str, num_blocks: int) -> int:
        """Evict up to ``num_blocks`` blocks from ``tier``, from storage permanently.

        Returns how many were evicted.
        """
        leaving = self.index.evict(tier, num_blocks)
        self.topology.allocators[tier].free(self._leave(leaving, tier, for_good=True))
        return len(leaving)

    def _leave(
        self, leaving: Sequence[BlockId], tier: str, for_good: bool = False
    ) -> Sequence[Slot]:
        """Remove evicted blocks from ``tier``. Return the slots that are free now."""
        if self.demote is not None and tier == self.topology.fastest:
            leaving = self.demote(leaving)
        self.transfers.report(tier, leaving, is_removed=True)
        if tier == self.topology.staging:
            self.transient_blocks.on_evict(leaving)
        if leaving and tier in self.topology.storages and (for_good or not self._evicts(tier)):
            keys = keys_of(self.index.names(leaving))
            self.mover.drop(tier, keys, for_good)
        return self.index.forget(leaving, tier)

    def _evicts(self, storage: str) -> bool:
        return self.mover.storages[storage].evicts
