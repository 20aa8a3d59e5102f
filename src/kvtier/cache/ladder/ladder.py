"""The ladder of tiers: joins the parts that decide on slots, copies and evictions."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from kvtier.cache.ladder.admission import Admission, TransientBlocks
from kvtier.cache.ladder.cost_metrics import CostMetrics, RecomputeWeight
from kvtier.cache.ladder.eviction import Eviction
from kvtier.cache.ladder.loads import Loads
from kvtier.cache.ladder.options import LadderCallbacks, LadderOptions
from kvtier.cache.ladder.reuse_sampler import ReuseSampler
from kvtier.cache.ladder.storage_lookup import LookupPatience, StorageLookup
from kvtier.cache.ladder.stores import Stores
from kvtier.cache.ladder.topology import Topology
from kvtier.cache.ladder.transfers import Transfers
from kvtier.cache.ladder.write_queues import WriteQueues
from kvtier.cache.transfer import Mover, Waiter
from kvtier.core.errors import UsageError
from kvtier.core.types import NO_BLOCK, BlockId, BlockKey, Direct, Slot
from kvtier.index import BlockIndex, KeyIndex, State
from kvtier.observe import Metrics
from kvtier.observe.specs import BREAKER_STATE, QUEUED_SECONDS, SLOT_BYTES, TRANSFERS_IN_FLIGHT
from kvtier.plan import Copy, CostModel
from kvtier.tiers import Quota, SlotAllocator, StorageTier

METRICS_PERIOD_S = 1.0
"""Interval between updates of the gauges, since each update queries every tier and route."""


class SlotCounts(NamedTuple):
    """Slots of a tier: in use, open by now, in all, and when the tier has grown."""

    num_used: int
    num_open: int
    num_slots: int
    capacity: int


class ReservedBlocks(NamedTuple):
    """New blocks, and the slots that an engine copies them to."""

    keys: Sequence[bytes]
    blocks: Sequence[BlockId]
    slots: Sequence[Slot]


class Ladder:
    """Slots, residencies and copies of all tiers. Owned by the cache's thread.

    Storage is read into the slowest memory tier, or directly into the fastest one, and written from
    the slowest. Storage tiers are independent of each other.

    Args:
        index: blocks by tier, shared with the cache, which looks blocks up. It has the same tiers,
            in this order.
        tiers: memory tiers and then storage tiers, fastest first. A tier of another process is
            represented by its ``SlotAllocator``.
        mover: executes the copies decided on here.
        options: see ``LadderOptions``.
        clock: seconds.
        metrics: counters and gauges of the ladder; by default counted but not exposed.
        device: name of the memory above the fastest tier, if the engine itself copies between the
            two.
        callbacks: functions that the ladder calls.

    Attributes:
        metrics: see above.
        costs: metrics of plans, of an engine's own copies and prefill, and of saved time.
        fastest: the tier that an engine computes in, or copies from and to.
        storages: the storage tiers, fastest first.
        lost: (block, tier) of copies that must not be used. Each is dropped once it is not leased.

    Raises:
        UsageError: the index has other tiers, or in another order.
    """

    def __init__(
        self,
        index: BlockIndex,
        tiers: Mapping[str, SlotAllocator | StorageTier],
        mover: Mover,
        options: LadderOptions,
        *,
        clock: Callable[[], float],
        metrics: Metrics | None = None,
        device: str | None = None,
        callbacks: LadderCallbacks | None = None,
    ) -> None:
        if tuple(index.tiers) != tuple(tiers):
            raise UsageError(
                f"index: it has the tiers {', '.join(index.tiers)}, and the ladder has "
                f"{', '.join(tiers)}; make the index for the ladder's tiers, in their order"
            )
        callbacks = callbacks or LadderCallbacks()
        self.metrics = metrics = metrics or Metrics(is_exposed=False)
        self._index = index
        self._mover = mover
        self._clock = clock
        allocators = {name: _allocator(tier) for name, tier in tiers.items()}
        self._topology = topology = Topology(allocators, mover.storages, device)
        self.fastest, self.storages = topology.fastest, topology.storages
        model = CostModel()
        self.costs = CostMetrics(metrics, model, clock)
        block_bytes, size = options.block_bytes, options.block_size
        self._transfers = transfers = Transfers(
            topology, index, mover, metrics, model, self.costs, clock, callbacks, block_bytes
        )
        self.lost: Collection[tuple[BlockId, str]] = transfers.lost.keys()
        self._reuse_sampler = ReuseSampler(index, metrics, clock)
        self._write_queues = queues = WriteQueues(
            topology, index, metrics, options, callbacks.may_write, clock
        )
        self._transient_blocks = TransientBlocks(topology, index, transfers, queues)
        self._admission = Admission(topology, index, self._transient_blocks, queues)
        demotes = options.demotes and topology.below(self.fastest) is not None
        self._eviction = eviction = Eviction(
            topology,
            index,
            mover,
            transfers,
            metrics,
            self._reuse_sampler,
            self._admission,
            self._transient_blocks,
            callbacks.on_left_out,
            self._demote if demotes else None,
        )
        patience = LookupPatience(options.lookup_patience_s, model, size)
        self._storage_lookup = lookup = StorageLookup(
            topology, index, mover, transfers, eviction, patience, metrics, clock
        )
        self._loads = loads = Loads(
            topology,
            index,
            mover,
            transfers,
            eviction,
            self._admission,
            model,
            metrics,
            clock,
            options.piece_blocks,
            block_bytes,
        )
        self._stores = stores = Stores(
            topology,
            index,
            mover,
            transfers,
            eviction,
            queues,
            lookup,
            metrics,
            options.piece_blocks,
            options.patience_s,
        )
        self._recompute_weight = RecomputeWeight(index, model, size) if size else None
        self._slot_bytes = block_bytes * options.num_shards
        self._metrics_due_s = -inf
        # Verbs that one part carries out alone; it documents them.
        # -- slots
        self.num_available = eviction.num_available
        self.allocate = eviction.allocate
        self.evict = eviction.make
        self.evict_blocks = eviction.remove
        # -- copies up, and reads ahead of requests
        self.load = loads.load
        self.claim = transfers.claim
        self.end_claimed = transfers.end_claimed
        self.step_s = transfers.step_s
        self.promote = loads.promote
        self.num_to_probe = loads.num_to_probe
        self.fetch_ahead = loads.fetch_ahead
        self.prefetch = loads.prefetch
        self.end_prefetch = loads.end_prefetch
        # -- copies down
        self.store = stores.store
        self.enqueue_write = stores.enqueue_write
        self.are_queued = queues.are_queued
        # -- look-ups in storage
        self.unindexed = lookup.unindexed
        self.lookup_storage = lookup.begin
        # -- upkeep
        self.on_admit = self._reuse_sampler.on_admit
        self.on_admit_sampled = self._reuse_sampler.on_admit_sampled
        self.note_arrivals = self._transient_blocks.note
        self.cost_snapshot = transfers.cost_snapshot
        self.drop_lost = transfers.drop_lost
        self.close = transfers.close

    def _demote(self, leaving: Sequence[BlockId]) -> Sequence[BlockId]:
        return self._stores.demote(leaving)

    # -- slots -------------------------------------------------------------------------------------

    def usage(self) -> dict[str, SlotCounts]:
        """Return the slots of each tier."""
        return {
            name: SlotCounts(
                allocator.num_used, allocator.num_open, allocator.num_slots, allocator.capacity
            )
            for name, allocator in self._topology.allocators.items()
        }

    @property
    def num_staging(self) -> int | None:
        """Slots for blocks on their way from storage, as by ``num_available``.

        None if all of them can be read without staging memory.
        """
        topology = self._topology
        if not topology.is_staged or topology.can_read_all_directly:
            return None
        return self.num_available(topology.staging)

    def reserve(
        self, index: KeyIndex, keys: Sequence[bytes], but_not: Sequence[BlockId]
    ) -> ReservedBlocks | None:
        """Reserve slots of the fastest tier for new blocks, which the engine copies there itself.

        If there are too few free slots, only blocks that the tier admits get one. Returns None, and
        evicts nothing, if others can't be evicted for these.

        Args:
            index: the ladder's index.
            keys: the new blocks, in prompt order.
            but_not: blocks that must not be evicted.
        """
        passing: Collection[bytes] = ()

        def admit() -> int:
            nonlocal keys, passing
            keys, passing = self._admission.admit_keys(index, keys, self.fastest)
            return len(keys)

        slots = self._eviction.reserve(len(keys), but_not, admit)
        if slots is None:
            return None
        blocks, hashes = index.write_new(keys, self.fastest, slots, self._clock())
        named = zip(keys, blocks, strict=True) if passing else ()
        self._transient_blocks.note(blocks, [block for key, block in named if key in passing])
        self._reuse_sampler.on_admit(hashes, blocks)
        return ReservedBlocks(keys, blocks, slots)

    def make_room(
        self, num_blocks: int, but_not: Sequence[BlockId], admits: Callable[[int], bool]
    ) -> None:
        """Evict blocks of the fastest tier until new ones have free slots, if all are admitted.

        but_not: see ``reserve``. admits: return whether all are admitted; called with the number of
        free slots if these are too few.
        """

        def admit() -> int:
            num_free = self._topology.allocators[self.fastest].num_free
            return num_blocks if admits(num_free) else 0

        self._eviction.make_room(num_blocks, but_not, admit, is_partial=False)

    @property
    def sample_mask(self) -> int:
        """Blocks whose hashes are 0 under this mask are sampled; see ``on_admit``."""
        return self._reuse_sampler.weight - 1

    def free(self, slots: Sequence[Slot]) -> None:
        """Free slots of the fastest tier that hold no block of the index."""
        self._topology.allocators[self.fastest].free(slots)

    # -- copies ------------------------------------------------------------------------------------

    @property
    def reads_all_directly(self) -> bool:
        """Whether all storage can be read into the engine's own memory."""
        topology = self._topology
        has_device = topology.device is not None and bool(topology.storages)
        return has_device and topology.can_read_all_directly

    def direct_mode(self, storage: str) -> Direct:
        """Return whether blocks of ``storage`` are read into the engine's own memory now.

        ON: always. AUTO: if the fastest tier is short of free slots. OFF also while reads hang.
        """
        topology, device = self._topology, self._topology.device
        if device is None or not self._mover.accepts((storage, device)):
            return Direct.OFF
        if storage in topology.direct:
            return Direct.ON
        return Direct.AUTO if storage in topology.direct_at_need else Direct.OFF

    def read_directly(
        self, blocks: Sequence[BlockId], storage: str, places: Sequence[Slot]
    ) -> None:
        """Begin to read blocks into the engine's own memory. They belong to no tier there.

        They can't be evicted from storage meanwhile. places: destination of each block, by the
        mover's numbering.
        """
        assert self._topology.device is not None, "no engine has memory above the tiers"
        self._loads.load_directly(Copy(storage, self._topology.device, blocks), places)

    def wait_for(self, waiter: Waiter, slots: Sequence[Slot]) -> None:
        """Keep ``waiter`` waiting until all transfers to these slots have arrived.

        slots: slots of the fastest tier, for the prompt's first blocks, in order.
        """
        for transfer, positions in self._transfers.in_flight.filling(slots, self.fastest):
            waiter.wait_for(transfer, positions)

    def end_reads(self, blocks: Sequence[BlockId]) -> None:
        """Note that leases of blocks in the fastest tier, for an engine's copies, have ended."""
        self._transient_blocks.passed(blocks)
        self.drop_lost()

    def distrust(self, blocks: Sequence[BlockId]) -> None:
        """Stop using the copies that the fastest tier has of blocks."""
        self._transfers.lose(blocks, self.fastest)

    # -- upkeep ------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Finish the transfers whose copy is done. Return whether there were any. Never waits."""
        staging, queues = self._topology.staging, self._write_queues
        finished = self._transfers.poll()
        for transfer in finished:
            if transfer.dst in queues:
                queues.ended(transfer.dst, len(transfer.blocks))
                self._transient_blocks.passed(transfer.blocks)
            elif transfer.dst == staging and transfer.src not in queues:
                queues.offer(transfer.blocks)
            elif transfer.src == staging:
                self._transient_blocks.passed(transfer.blocks)
            self._loads.arrived(transfer)
        self._stores.write()
        self._storage_lookup.hear()
        self._transfers.drop_lost()
        self._transfers.scrub()
        if self._clock() >= self._metrics_due_s:
            self.update_metrics()
        if self._recompute_weight is not None:
            self._recompute_weight.update()
        return bool(finished)

    @property
    def is_busy(self) -> bool:
        """Whether transfers or look-ups are waited for, or work is due.

        Late ones don't count.
        """
        if self._transfers.is_dropping or self._storage_lookup.is_waiting:
            return True
        staging, queues = self._topology.staging, self._write_queues
        waits = queues.is_open and any(
            self._mover.accepts((staging, name)) for name in queues.waiting
        )
        return waits or any(not transfer.is_late for transfer in self._transfers.in_flight.all)

    def drain(self, timeout_s: float, poll: Callable[[], object]) -> bool:
        """Call ``poll`` until no transfer is in flight. Return False on time-out."""
        ends_s = time.monotonic() + timeout_s
        while self._transfers.in_flight.all:
            if not self._transfers.in_flight.wait(max(0.0, ends_s - time.monotonic())):
                return False
            poll()
        return True

    def update_metrics(self) -> None:
        """Update the gauges of the tiers: slots, transfers in flight, queues, open breakers."""
        self._metrics_due_s = self._clock() + METRICS_PERIOD_S
        metrics, usage = self.metrics, self.usage()
        metrics.occupancy(
            {name: slots.num_used for name, slots in usage.items()},
            {
                name: slots.num_open if name in self.storages else slots.num_slots
                for name, slots in usage.items()
            },
        )
        for name in usage:
            metrics.gauge(SLOT_BYTES, self._slot_bytes, tier=name)
        for (src, dst), num in self._transfers.in_flight.by_route.items():
            metrics.gauge(TRANSFERS_IN_FLIGHT, num, src=src, dst=dst)
        for (src, dst), seconds in self._transfers.queued_s().items():
            metrics.gauge(QUEUED_SECONDS, seconds, src=src, dst=dst)
        for name in self.storages:
            metrics.gauge(BREAKER_STATE, self._mover.breaker(name), tier=name)

    def delete(
        self,
        names: Sequence[BlockKey],
        blocks: Sequence[BlockId],
        reserved: Collection[BlockId] = (),
    ) -> None:
        """Delete blocks from every tier, from storage permanently.

        A copy that is in use or in flight is not used from now on; it is deleted as soon as it is
        released. Storage drops blocks that the index does not know, too.

        Args:
            names: keys of the blocks in storage.
            blocks: the blocks; ``NO_BLOCK`` for one that the index does not know.
            reserved: blocks that the engine itself copies to the fastest tier, and gives up.
        """
        transfers = self._transfers
        for tier in self._topology.allocators:
            but = reserved if tier == self.fastest else ()
            known = [block for block in blocks if block != NO_BLOCK and block not in but]
            states = self._index.states_of(known, tier)
            there = [b for b, at in zip(known, states, strict=True) if at is not State.ABSENT]
            transfers.lose(there, tier)
        transfers.drop_lost()
        self._storage_lookup.forget_keys(names)
        for storage in self.storages:
            pairs = zip(names, blocks, strict=True)
            # Others are dropped when they are released: nothing is dropped while it moves.
            free = [name for name, block in pairs if (block, storage) not in self.lost]
            self._mover.drop(storage, free, for_good=True)

    def clear(self) -> None:
        """Delete every block that is not leased, also from storage.

        Blocks in flight are discarded.
        """
        num_known = max(self._index.num_held(tier) for tier in self._index.tiers)
        for _ in self.clear_in_steps(max(1, num_known)):
            pass
        for storage in self.storages:
            self._mover.drop_unindexed(storage)

    def clear_in_steps(self, num_at_once: int) -> Iterator[None]:
        """Delete every block that the index knows and that is not leased; yield between steps.

        Blocks in flight are discarded, with look-ups and queued writes, before the first step.
        """
        self._transfers.void()
        self._storage_lookup.forget()
        self._write_queues.clear()
        self._reuse_sampler.forget()
        for tier in self._topology.allocators:
            for _ in range(self._index.num_held(tier) // num_at_once + 1):
                if not self._eviction.delete(tier, num_at_once):
                    break
                yield

    def check_invariants(self, num_private: int) -> None:
        """Raise AssertionError if slots and blocks don't add up.

        num_private: slots of the fastest tier that requests use without the index.
        """
        self._index.check_invariants()
        for name, slots in self.usage().items():
            in_use = slots.num_used
            expected = self._index.num_held(name) + (num_private if name == self.fastest else 0)
            assert in_use == expected, f"{name}: {in_use} slots in use, {expected} accounted for"


def _allocator(tier: SlotAllocator | StorageTier) -> SlotAllocator:
    """Return the room for blocks in a tier: its slots in memory, a number of blocks in storage."""
    return Quota(lambda: tier.num_blocks) if isinstance(tier, StorageTier) else tier
