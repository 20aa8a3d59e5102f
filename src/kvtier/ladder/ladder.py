"""The ladder of tiers: joins the parts that decide on slots, copies and evictions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from kvtier.index import BlockIndex, State
from kvtier.ladder.admission import Admission
from kvtier.ladder.cost_metrics import CostMetrics
from kvtier.ladder.eviction import Eviction
from kvtier.ladder.gauges import Gauges
from kvtier.ladder.loads import DirectLoads, Loads
from kvtier.ladder.options import LadderOptions
from kvtier.ladder.probes import Probes
from kvtier.ladder.recompute_weight import RecomputeWeight
from kvtier.ladder.reuse_sampler import ReuseSampler
from kvtier.ladder.storage_lookup import LookupPatience, StorageLookup
from kvtier.ladder.stores import StorageWriter, Stores, WriteBack
from kvtier.ladder.topology import Topology
from kvtier.ladder.transfers import Transfers
from kvtier.ladder.transient_blocks import TransientBlocks
from kvtier.ladder.write_queues import WriteQueues
from kvtier.plan import CostModel, Costs
from kvtier.telemetry import Metrics
from kvtier.tiers import Room
from kvtier.transfer import Mover, Waiter
from kvtier.types import NO_BLOCK, BlockId, BlockKey, Slot


class Ladder:
    """Slots, residencies and copies of all tiers.

    Its parts are its attributes, and caches call them directly. Only operations that concern
    several parts are methods.

    Storage is read into the slowest memory tier, or directly into the fastest one, and written from
    the slowest. Storage tiers are independent of each other.

    Args:
        index: blocks by tier: memory tiers, then storage tiers, fastest first. Shared with the
            cache, which looks blocks up.
        rooms: slots of these tiers.
        mover: executes the copies decided on here.
        options: see ``LadderOptions``.
        clock: seconds.
        metrics: counters and gauges of the ladder.
        device: name of the memory above the fastest tier, if the engine itself copies between the
            two.

    Attributes:
        topology: order of the tiers, and the slots of each.
        costs: measured costs of copies and prefill.
        account: metrics of plans, of an engine's own copies and prefill, and of saved time.
        transfers: copies in flight, lost blocks, and the listener for changes.
        reuse_sampler: sample of evicted blocks that are requested again.
        write_queues: blocks that wait for a write to storage.
        transient_blocks: blocks that only pass through the staging memory.
        admission: decides which blocks a tier admits.
        eviction: allocation of slots, and eviction.
        stores: copies to the memory tier below.
        storage_lookup: look-ups in storage of blocks that the index does not know.
        loads: copies towards the fastest tier, and prefetches.
        direct: reads from storage into an engine's own memory.
        storage_writer: writes to storage.
        gauges: metrics of the state of the tiers.
    """

    def __init__(
        self,
        index: BlockIndex,
        rooms: Mapping[str, Room],
        mover: Mover,
        *,
        options: LadderOptions,
        clock: Callable[[], float],
        metrics: Metrics,
        device: str | None = None,
    ) -> None:
        self.metrics = metrics
        self._index = index
        self._mover = mover
        self.topology = topology = Topology(rooms, mover.storages, device)
        self.costs = CostModel()
        self.account = CostMetrics(metrics, self.costs, clock)
        self.transfers = transfers = Transfers(
            topology, index, mover, metrics, self.costs, self.account, clock, options.block_bytes
        )
        slot_bytes = options.block_bytes * options.num_shards
        self.gauges = Gauges(topology, transfers, mover, metrics, slot_bytes, clock)
        self.reuse_sampler = ReuseSampler(index, metrics, clock)
        self.write_queues = WriteQueues(topology, index, metrics, options, clock)
        self.transient_blocks = TransientBlocks(topology, index, transfers, self.write_queues)
        self.admission = Admission(topology, index, self.transient_blocks, self.write_queues)
        self.eviction = eviction = Eviction(
            topology,
            index,
            mover,
            transfers,
            metrics,
            self.reuse_sampler,
            self.admission,
            self.transient_blocks,
        )
        self.stores = Stores(topology, index, transfers, eviction, metrics)
        size = options.block_size
        patience = LookupPatience(options.lookup_patience_s, self.costs, size)
        self.storage_lookup = StorageLookup(
            topology, index, mover, transfers, eviction, patience, metrics, clock
        )
        self.loads = Loads(
            topology,
            index,
            mover,
            transfers,
            eviction,
            self.admission,
            options.piece_blocks,
            Probes(mover, transfers, self.costs, options.block_bytes, metrics, clock),
        )
        self.direct = DirectLoads(topology, mover, self.loads)
        self.storage_writer = StorageWriter(
            topology,
            mover,
            transfers,
            self.write_queues,
            self.storage_lookup,
            self.stores,
            options.piece_blocks,
        )
        if options.demotes and topology.below(topology.fastest) is not None:
            eviction.demoter = WriteBack(
                topology, index, transfers, self.stores, self.storage_writer, options.patience_s
            )
        self._recompute_weight = RecomputeWeight(index, self.costs, size) if size else None

    @property
    def fastest(self) -> str:
        """The tier that an engine computes in, or copies from and to."""
        return self.topology.fastest

    @property
    def storages(self) -> list[str]:
        """The storage tiers, fastest first."""
        return self.topology.storages

    def cost_snapshot(self, is_free: bool = False) -> Costs:
        """Return current costs of copies and prefill, including the queued work.

        is_free: treat every load as free.
        """
        return self.transfers.cost_snapshot(is_free)

    def poll(self) -> bool:
        """Finish the transfers whose copy is done. Return whether there were any. Never waits."""
        staging, queues = self.topology.staging, self.write_queues
        finished = self.transfers.poll()
        for transfer in finished:
            if transfer.dst in queues:
                queues.ended(transfer.dst, len(transfer.blocks))
                self.transient_blocks.passed(transfer.blocks)
            elif transfer.dst == staging and transfer.src not in queues:
                queues.offer(transfer.blocks)
            elif transfer.src == staging:
                self.transient_blocks.passed(transfer.blocks)
            self.loads.arrived(transfer)
        self.storage_writer.write()
        self.storage_lookup.hear()
        self.transfers.drop_lost()
        self.transfers.scrub()
        self.gauges.refresh()
        if self._recompute_weight is not None:
            self._recompute_weight.look()
        return bool(finished)

    @property
    def is_busy(self) -> bool:
        """Whether transfers are in flight, or work is due. Late transfers don't count."""
        if self.transfers.is_dropping:
            return True
        waits = self.write_queues.is_open and any(
            self._mover.accepts((self.topology.staging, name)) for name in self.write_queues.waiting
        )
        return waits or any(not transfer.is_late for transfer in self.transfers.transfers)

    def wait_for(self, waiter: Waiter, slots: Sequence[Slot]) -> None:
        """Keep ``waiter`` waiting until all transfers to these slots have arrived.

        slots: slots of the fastest tier, for the prompt's first blocks, in order.
        """
        for transfer, positions in self.transfers.bringing(slots, self.topology.fastest):
            waiter.wait_for(transfer, positions)

    def clear(self) -> None:
        """Delete every block that is not leased, also from storage.

        Blocks in flight are discarded.
        """
        self.begin_clear()
        self.eviction.clear()

    def delete(
        self,
        names: Sequence[BlockKey],
        blocks: Sequence[BlockId],
        reserved: Collection[BlockId],
    ) -> None:
        """Delete blocks from every tier, from storage for good.

        A copy that is in use, or in flight, is not used any more from now on; it is deleted as soon
        as it is released. Storage drops blocks that the index does not know, too.

        Args:
            names: keys of the blocks in storage.
            blocks: the blocks; ``NO_BLOCK`` for one that the index does not know.
            reserved: those that the engine itself copies to the fastest tier; it gives them up.
        """
        transfers = self.transfers
        for tier in self.topology.rooms:
            but = reserved if tier == self.fastest else ()
            known = [block for block in blocks if block != NO_BLOCK and block not in but]
            states = self._index.states_of(known, tier)
            there = [b for b, at in zip(known, states, strict=True) if at is not State.ABSENT]
            transfers.lose(there, tier)
        transfers.drop_lost()
        self.storage_lookup.forget_keys(names)
        for storage in self.topology.storages:
            pairs = zip(names, blocks, strict=True)
            # Others are dropped when they are released: nothing is dropped while it moves.
            free = [name for name, block in pairs if (block, storage) not in transfers.lost]
            self._mover.drop(storage, free, for_good=True)

    def begin_clear(self) -> None:
        """Discard blocks in flight, look-ups and queued writes, before every block is deleted."""
        self.transfers.void()
        self.storage_lookup.forget()
        self.write_queues.clear()

    def used_slots(self) -> dict[str, int]:
        """Return the slots in use per tier."""
        return {name: room.num_used for name, room in self.topology.rooms.items()}

    def open_slots(self) -> dict[str, int]:
        """Return the slots per tier that are open by now."""
        return {name: room.num_open for name, room in self.topology.rooms.items()}

    def num_slots(self) -> dict[str, int]:
        """Return the total number of slots per tier."""
        return {name: room.num_slots for name, room in self.topology.rooms.items()}

    def close(self) -> set[str]:
        """Finish the transfers in flight. Return the tiers that are still in use afterwards."""
        return self.transfers.close()

    def check_invariants(self, num_private: int) -> None:
        """Raise AssertionError if slots and blocks don't add up.

        num_private: slots of the fastest tier that requests use without the index.
        """
        self._index.check_invariants()
        for name, in_use in self.used_slots().items():
            expected = self._index.num_held(name) + (num_private if name == self.fastest else 0)
            assert in_use == expected, f"{name}: {in_use} slots in use, {expected} accounted for"
