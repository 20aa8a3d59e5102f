"""The tiers as one ladder: room in each, copies between them, what leaves when one is full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtier.devices import Device, Direction
from kvtier.index import State, make_index
from kvtier.index.policies import EvictionPolicy
from kvtier.lease import Transfer
from kvtier.plan import Copy, CostModel, Costs
from kvtier.telemetry import Metrics
from kvtier.tiers import MemoryTier
from kvtier.transfer import TransferEngine, stage
from kvtier.types import DEVICE, BlockId, Slot

STORABLE = (State.READY, State.EVICTING)
"""States in which a block's bytes can be copied to the tier below."""


class Ladder:
    """Slots, residencies and copies, kept in step.

    tiers: fastest first. make_policy: makes the eviction policy of each tier. demotes: blocks that
    leave the device go one tier down (write_back).
    patience_s: how long a demotion may hold up an eviction.
    """

    def __init__(
        self,
        tiers: Mapping[str, MemoryTier],
        device: Device,
        *,
        make_policy: Callable[[], EvictionPolicy],
        demotes: bool,
        patience_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.tiers = dict(tiers)
        self.index = make_index({name: make_policy() for name in tiers})
        self.metrics = Metrics()
        self.costs = CostModel()
        self._engine = TransferEngine(device)
        self._transfers: list[Transfer] = []
        self._demotes = demotes
        self._patience_s = patience_s
        self._clock = clock

    def below(self, tier: str) -> str | None:
        """The next slower tier."""
        names = list(self.tiers)
        after = names.index(tier) + 1
        return names[after] if after < len(names) else None

    # -- room -------------------------------------------------------------------------------------

    def num_available(self, tier: str) -> int:
        """Slots of ``tier`` that are free or could be had by eviction. An upper bound."""
        return self.tiers[tier].num_free + self.index.num_evictable(tier)

    def allocate(self, tier: str, num_slots: int) -> list[Slot] | None:
        """Slots of ``tier``, after evicting what has to go; None when that is not enough.

        Attention reads neighbours in place and gathers anything else in every step, so where a
        tier below keeps copies, more is evicted until there is a run: at most twice ``num_slots``.
        """
        room = self.tiers[tier]
        missing = num_slots - room.num_free
        if missing > self.index.num_evictable(tier):
            return None
        self.make_room(tier, missing)
        budget = 2 * num_slots if self.below(tier) else 0
        while budget > 0 and (short := num_slots - room.longest_run()) > 0:
            more = min(budget, max(short, num_slots // 8))
            budget -= more
            if not self.make_room(tier, more):
                break
        return room.allocate(num_slots)

    def make_room(self, tier: str, num_blocks: int) -> int:
        """Evict up to ``num_blocks`` blocks from ``tier``, leaves first. Returns how many left."""
        below = self.below(tier)
        if self._demotes and tier == DEVICE and below is not None:
            leaving = self._demote(self.index.evict(tier, num_blocks), tier, below)
            slots = self.index.forget_all(leaving, tier)
        else:
            slots = self.index.drop(tier, num_blocks)
        self.tiers[tier].free(slots)
        if slots:
            self.metrics.count("kvtier_evicted_blocks_total", len(slots), tier=tier)
        return len(slots)

    # -- copies -----------------------------------------------------------------------------------

    def start(self, copy: Copy, dst_slots: Sequence[Slot]) -> Transfer:
        """Begin to copy into ``dst_slots``. The sources can't leave until the copy is finished."""
        src, dst, blocks = copy.src, copy.dst, copy.blocks
        batch = stage(self.tiers[src], self.index.slots(blocks, src), self.tiers[dst], dst_slots)
        holds_source = all(state is State.READY for state in self.index.states_of(blocks, src))
        if holds_source:
            self.index.lease(blocks, src)
        self.index.begin_write_all(blocks, dst, dst_slots)
        direction = Direction.LOAD if dst == DEVICE else Direction.STORE
        job = self._engine.submit(batch, direction)
        transfer = Transfer(src, dst, blocks, job, holds_source)
        self._transfers.append(transfer)
        return transfer

    def store(self, blocks: Sequence[BlockId], src: str = DEVICE, num_there: int = 0) -> int:
        """Copy blocks one tier down where they are not there yet, as far as there is room.

        blocks: consecutive, in prompt order. num_there: how many of the first ones were there after
        the last call, to spare looking at them again.
        Returns how many of the first ones are there now, or on their way.
        """
        dst = self.below(src)
        if dst is None:
            return 0
        if num_there and self.index.state(blocks[num_there - 1], dst) is State.ABSENT:
            num_there = 0  # evicted meanwhile
        there = self.index.states_of(blocks[num_there:], dst)
        here = self.index.states_of(blocks[num_there:], src)
        missing = [
            at
            for at, (below, above) in enumerate(zip(there, here, strict=True), num_there)
            if below is State.ABSENT and above in STORABLE
        ]
        if not missing:
            return len(blocks)
        self._make_room_for([blocks[at] for at in missing], dst)
        slots = self.tiers[dst].allocate(min(len(missing), self.tiers[dst].num_free)) or []
        if slots:
            fits = tuple(blocks[at] for at in missing[: len(slots)])
            self.start(Copy(src, dst, fits), slots)
        if len(slots) < len(missing):
            refused = len(missing) - len(slots)
            self.metrics.count("kvtier_refused_blocks_total", refused, tier=dst)
            return missing[len(slots)]
        return len(blocks)

    def _make_room_for(self, blocks: Sequence[BlockId], tier: str) -> None:
        """Evict from ``tier`` what has to go for ``blocks``, but not the prefixes that they
        continue: the end of a prompt must not push out its beginning."""
        lacking = len(blocks) - self.tiers[tier].num_free
        if lacking > 0:
            prefixes = self.index.prefixes(blocks, tier)
            self.index.lease(prefixes, tier)
            self.make_room(tier, lacking)
            self.index.release(prefixes, tier)

    def arriving(self, blocks: Iterable[BlockId]) -> list[Transfer]:
        """Transfers that bring one of ``blocks`` to the device."""
        wanted = set(blocks)
        return [
            transfer
            for transfer in self._transfers
            if transfer.dst == DEVICE and not wanted.isdisjoint(transfer.blocks)
        ]

    def poll(self) -> bool:
        """Finish the transfers whose copy is done. True if there was one. Never waits."""
        finished = [transfer for transfer in self._transfers if transfer.job.done]
        for transfer in finished:
            self._finish(transfer)
        return bool(finished)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the oldest transfer is done, or there is none. False on time-out."""
        return not self._transfers or self._transfers[0].job.wait(timeout_s)

    @property
    def num_transfers(self) -> int:
        """Transfers that are not finished."""
        return len(self._transfers)

    def cost_snapshot(self) -> Costs:
        """What copies and prefill cost now, with the work that stands in line before a new load."""
        queued_bytes = self._engine.queued_bytes(Direction.LOAD)
        costs = self.costs.snapshot()
        return self.costs.snapshot(
            {(name, DEVICE): costs.copy_s((name, DEVICE), queued_bytes) for name in self.tiers}
        )

    def _finish(self, transfer: Transfer) -> None:
        """What arrived is ready, what failed is absent; then the leases that waited are told."""
        self._transfers.remove(transfer)
        src, dst, blocks, job = transfer.src, transfer.dst, transfer.blocks, transfer.job
        if job.succeeded:
            now = self._clock()
            self.index.commit_all(blocks, dst, now)
            for lease in transfer.waiters:
                lease.arrive(transfer, now)
            self.costs.observe_copy((src, dst), job.num_bytes, job.seconds)
            self.metrics.count("kvtier_copied_bytes_total", job.num_bytes, src=src, dst=dst)
            self.metrics.observe("kvtier_copy_seconds", job.seconds, src=src, dst=dst)
        else:
            for lease in list(transfer.waiters):
                lease.give_up()
            self.metrics.count("kvtier_failed_copies_total", src=src, dst=dst)
        if transfer.holds_source:
            self.index.release(blocks, src)
        if not job.succeeded:
            self.tiers[dst].free(self.index.abort_all(blocks, dst))

    def _demote(self, leaving: list[BlockId], src: str, dst: str) -> list[BlockId]:
        """Copy blocks that are being evicted one tier down, and wait. Returns those that may go.

        Blocks nearest to the root are worth most, and go first where ``dst`` has not room for all.
        """
        before = len(self._transfers)
        self.store(leaving[::-1], src)
        for transfer in self._transfers[before:]:
            if transfer.job.wait(self._patience_s):
                self._finish(transfer)
                continue
            for block in transfer.blocks:  # still being read: it has to stay
                self.index.keep(block, src)
            self.index.lease(transfer.blocks, src)
            transfer.holds_source = True
            staying = set(transfer.blocks)
            leaving = [block for block in leaving if block not in staying]
        return leaving

    # -- upkeep -----------------------------------------------------------------------------------

    def used_slots(self) -> dict[str, int]:
        """Slots in use per tier."""
        return {name: tier.num_slots - tier.num_free for name, tier in self.tiers.items()}

    def num_slots(self) -> dict[str, int]:
        """Slots in all per tier."""
        return {name: tier.num_slots for name, tier in self.tiers.items()}

    def close(self) -> None:
        """Finish what is on its way, then give the tiers back."""
        self._engine.close()
        self.poll()
        for tier in self.tiers.values():
            tier.close()

    def check_invariants(self, num_private: int) -> None:
        """Raise AssertionError where slots and blocks don't add up. num_private: device slots that
        requests use and the index does not know."""
        self.index.check_invariants()
        for name, in_use in self.used_slots().items():
            expected = self.index.num_held(name) + (num_private if name == DEVICE else 0)
            assert in_use == expected, f"{name}: {in_use} slots in use, {expected} accounted for"
