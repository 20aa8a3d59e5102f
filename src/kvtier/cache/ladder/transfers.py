"""Copies between tiers: begins them, notices their end, and updates the index."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice

from kvtier.cache.ladder.cost_metrics import CostMetrics
from kvtier.cache.ladder.in_flight import InFlight
from kvtier.cache.ladder.options import LadderCallbacks
from kvtier.cache.ladder.topology import Topology
from kvtier.cache.transfer import Job, Move, Mover, Transfer
from kvtier.core.errors import CacheError, TierError
from kvtier.core.types import BlockId, BlockKey, Slot, keys_of
from kvtier.index import BlockIndex, State
from kvtier.observe import Metrics
from kvtier.observe.specs import (
    COPIED_BYTES,
    COPY_SECONDS,
    DAMAGED_BLOCKS,
    FAILED_BLOCKS,
    FAILED_COPIES,
    SCRUBBED_BYTES,
    WARMED_BLOCKS,
    WARMED_BYTES,
)
from kvtier.plan import Copy, CostModel, Costs, Route

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 10.0
"""Longest wait for copies in flight when the cache closes."""
LOST_AT_ONCE = 2048
"""Copies that ``drop_lost`` examines per call: dropping so many takes 15 ms."""


class Transfers:
    """Transfers in flight. Owned by the cache's thread; the mover does the copying.

    A transfer may have to wait for another that brings its sources: a load from disk is a copy to
    host memory, followed by one to the device.

    Blocks copied to the device above the fastest tier belong to no tier, and the index does not
    know of them.

    Attributes:
        in_flight: the transfers in flight.
        lost: (block, tier) of copies that must not be used. Each is dropped once it is not leased.
        is_dropping: whether the last ``drop_lost`` has dropped copies, and left some.
    """

    def __init__(
        self,
        topology: Topology,
        index: BlockIndex,
        mover: Mover,
        metrics: Metrics,
        costs: CostModel,
        account: CostMetrics,
        clock: Callable[[], float],
        callbacks: LadderCallbacks,
        block_bytes: int = 0,
    ) -> None:
        self._topology = topology
        self._ways = topology.ways()
        self._least_s = {
            self._ways[name][0]: facts.request_s
            for name, facts in mover.storages.items()
            if name in self._ways
        }
        self._loads = {route for way in self._ways.values() for route in way}
        self._block_bytes = block_bytes
        self._index = index
        self._mover = mover
        self._metrics = metrics
        self._clock = clock
        self._costs = costs
        self._account = account
        self._on_change = callbacks.on_change
        memories = {name: topology.allocators[name] for name in topology.memories}
        self.in_flight = InFlight(memories, callbacks.on_end)
        self._failed_once: set[BlockId] = set()
        self.lost: dict[tuple[BlockId, str], BlockKey | None] = {}
        self.is_dropping = False

    # -- begin ------------------------------------------------------------------------------------

    def begin(
        self,
        copy: Copy,
        dst_slots: Sequence[Slot],
        after: Transfer | None = None,
        urgent: bool = True,
    ) -> Transfer:
        """Begin a copy. Its sources can't be evicted until it is finished.

        Args:
            copy: blocks, source and destination.
            dst_slots: slot of each block in the destination.
            after: the transfer that brings the sources, if they are in flight themselves.
            urgent: False for a read that no request waits for yet; urgent reads pass it.
        """
        if copy.dst != self._topology.device:
            self._index.begin_write(copy.blocks, copy.dst, dst_slots)
        transfer = Transfer(copy.src, copy.dst, copy.blocks, after, dst_slots=dst_slots)
        self.in_flight.add(transfer)
        if after is None:
            self._submit(transfer, urgent)
        else:
            after.followers.append(transfer)
        return transfer

    def hurry(self, transfer: Transfer) -> None:
        """Make a read urgent, since a request waits for it now."""
        if transfer.job is not None:
            self._mover.hurry((transfer.src, transfer.dst), transfer.job)

    def withdraw(self, transfer: Transfer) -> None:
        """Cancel a transfer that has not started, unless requests wait for it."""
        if transfer.job is None or transfer.waiters:
            return
        if self._mover.withdraw((transfer.src, transfer.dst), transfer.job):
            self.finish(transfer)

    def claim(self, transfers: Sequence[Transfer]) -> bool:
        """Take queued copies to the device out of their queues: the engine computes their blocks.

        Pass them to ``end_claimed`` before the next ``poll``. Returns False, and takes none, if
        one has begun, or if something else waits for its read.
        """
        queued = list(dict.fromkeys(transfer.after or transfer for transfer in transfers))
        routes = {(transfer.src, transfer.dst) for transfer in queued}
        jobs = [transfer.job for transfer in queued if transfer.job is not None]
        leaders = [transfer for transfer in queued if transfer.followers]
        is_needed = any(
            leader.waiters or not set(leader.followers) <= set(transfers) for leader in leaders
        )
        if is_needed or len(routes) != 1 or len(jobs) < len(queued):
            return False
        if not self._mover.cancel(routes.pop(), jobs):
            return False
        for leader in leaders:
            leader.followers.clear()
            self.finish(leader)
        for transfer in transfers:
            transfer.after, transfer.job, transfer.expected_s = None, Job(0), 0.0
        return True

    def end_claimed(self, transfers: Sequence[Transfer], error: CacheError | None = None) -> None:
        """End claimed copies. error: why the engine did not compute their blocks."""
        for transfer in transfers:
            assert transfer.job is not None, "it was claimed"
            transfer.job.withdrawn = error is not None
            transfer.job.finish(error)
            self.finish(transfer)

    def step_s(self, transfers: Sequence[Transfer]) -> float:
        """Return the expected seconds of the slowest step of loads, without their queues.

        0 if it was not measured yet.
        """
        num_bytes = Counter[Route]()
        for transfer in transfers:
            for step in filter(None, (transfer.after, transfer)):
                num_bytes[step.src, step.dst] += len(transfer.blocks) * self._block_bytes
        return max(self._costs.expected_copy_s(route, num) for route, num in num_bytes.items())

    def refuse(self, copy: Copy, reason: str) -> Transfer:
        """Return a transfer that has failed already. The next ``poll`` notifies its waiters."""
        transfer = Transfer(copy.src, copy.dst, ())
        self.in_flight.add(transfer)
        self.in_flight.watch(transfer, job := Job(0))
        job.finish(TierError(copy.dst, "load", reason))
        return transfer

    def _submit(
        self, transfer: Transfer, urgent: bool = True, leader: Transfer | None = None
    ) -> None:
        """Queue a copy whose sources are ready. leader: the transfer that has just brought them."""
        blocks, src, dst = transfer.blocks, transfer.src, transfer.dst
        if leader is not None or self._are_ready(blocks, src):
            self._index.lease(blocks, src)
            transfer.holds_source = True
        if src in self._mover.storages or dst in self._mover.storages:
            transfer.names = self._index.names(blocks)
        if src in self._mover.storages:
            src_slots = transfer.dst_slots  # a placeholder: storage is addressed by name
        elif leader is not None and leader.blocks is blocks:
            src_slots = leader.dst_slots
        else:
            src_slots = self._index.slots(blocks, src)
        move = Move(src, dst, src_slots, transfer.dst_slots, transfer.names)
        job = self._mover.begin(move, urgent)
        if (src, dst) in self._loads:
            transfer.expected_s = self._expected_s((src, dst), job.num_bytes)
        self.in_flight.watch(transfer, job)

    def _expected_s(self, route: Route, num_bytes: int) -> float:
        known_s = self._costs.expected_copy_s(route, num_bytes)
        return max(known_s, self._least_s.get(route, 0.0)) if known_s else 0.0

    def _are_ready(self, blocks: Sequence[BlockId], tier: str) -> bool:
        return self._index.states_of(blocks, tier).count(State.READY) == len(blocks)

    # -- end --------------------------------------------------------------------------------------

    def poll(self) -> list[Transfer]:
        """Finish transfers whose copy is done, up to the limit of one poll, and return them."""
        finished = list(self.in_flight.take_ended())
        for transfer in finished:
            self.finish(transfer)
        return finished

    def finish(self, transfer: Transfer) -> None:
        """Mark arrived blocks ready and others absent, then notify the waiters."""
        job = transfer.job
        assert job is not None
        assert job.done
        self.in_flight.remove(transfer)
        absent = _absent(transfer, job)
        is_ours = transfer.dst != self._topology.device
        if is_ours:
            self._arrive(transfer, absent)
        self._note(transfer, job)
        for waiter in list(transfer.waiters):
            if job.succeeded and not absent:
                waiter.arrived(transfer, self._clock())
            else:
                waiter.failed(transfer)
        if transfer.holds_source:
            self._index.release(transfer.blocks, transfer.src)
        if absent and is_ours:
            self._undo(transfer, absent)
        self._distrust(transfer, job)
        for follower in transfer.followers:
            self._follow(follower, transfer)

    def _arrive(self, transfer: Transfer, absent: Collection[int]) -> None:
        """Mark blocks ready, but those at ``absent``. A prompt's first blocks are evicted last."""
        there: Sequence[BlockId] = transfer.blocks
        if absent:
            there = [block for at, block in enumerate(there) if at not in absent]
        self._index.commit(there[::-1], transfer.dst, self._clock())
        self.report(transfer.dst, there)

    def _undo(self, transfer: Transfer, absent: Collection[int]) -> None:
        """Record that the blocks at these positions did not arrive."""
        dst, positions = transfer.dst, sorted(absent)
        blocks = [transfer.blocks[at] for at in positions]
        self._topology.allocators[dst].free(self._index.abort(blocks, dst))
        is_shared = dst in self._mover.storages and self._mover.storages[dst].is_shared
        # After a time-out some blocks may have been written all the same. Those in shared storage
        # are valid, and may be another process's.
        if dst in self._mover.storages and (transfer.is_void or not is_shared):
            keys = [transfer.names[at].key for at in positions]
            self._mover.drop(dst, keys, for_good=True)

    def _note(self, transfer: Transfer, job: Job) -> None:
        src, dst = transfer.src, transfer.dst
        if job.succeeded and not job.num_bytes:  # the engine computed the blocks
            return
        if job.succeeded:  # the duration of a failed copy says nothing of its cost
            self._costs.observe_copy((src, dst), job.num_bytes, job.seconds, self._clock())
            self._account.loaded(src, transfer.expected_s, job.seconds)
        if job.error is None:
            num_bytes = job.num_bytes - job.num_bytes * len(job.lost) // len(transfer.blocks)
            self._metrics.count(COPIED_BYTES, num_bytes, src=src, dst=dst)
            self._metrics.observe(COPY_SECONDS, job.seconds, src=src, dst=dst)
        if not job.succeeded and not job.withdrawn:
            self._metrics.count(FAILED_COPIES, src=src, dst=dst)
            num = len(job.lost) if job.error is None else len(transfer.blocks)
            self._metrics.count(FAILED_BLOCKS, num, src=src, dst=dst)
        if job.num_damaged:
            self._metrics.count(DAMAGED_BLOCKS, job.num_damaged, tier=src)

    def _distrust(self, transfer: Transfer, job: Job) -> None:
        """Forget blocks that storage no longer has; drop a memory copy after two failed reads.

        The two reads must fail in a row.
        """
        blocks, src = transfer.blocks, transfer.src
        self.lose([blocks[at] for at in job.gone], src)
        if src in self._mover.storages or transfer.dst != self._topology.fastest or job.withdrawn:
            return
        if job.error is None:
            if self._failed_once:
                self._failed_once.difference_update(blocks)
            return
        again = self._failed_once.intersection(blocks)
        self._failed_once.symmetric_difference_update(blocks)
        self.lose(list(again), src)

    def _follow(self, follower: Transfer, leader: Transfer) -> None:
        """Begin the transfer that waited for ``leader``, or fail it if ``leader`` failed."""
        assert leader.job is not None
        follower.after = None
        if leader.job.succeeded and not leader.is_void:
            self._submit(follower, leader=leader)
        else:
            follower.job = Job(0)
            follower.job.withdrawn = True
            follower.job.finish(TierError(follower.src, "load", "the block did not arrive there"))
            self.finish(follower)

    def scrub(self) -> None:
        """Have idle storage verify a few blocks now and then, and count. Never waits."""
        for warmed in self._mover.warmed():
            self._metrics.count(WARMED_BLOCKS, warmed.num_blocks, tier=warmed.tier)
            self._metrics.count(WARMED_BYTES, warmed.num_bytes, tier=warmed.tier)
        for each in self._mover.scrub():
            self._metrics.count(SCRUBBED_BYTES, each.num_bytes, tier=each.tier)
            self._metrics.count(DAMAGED_BLOCKS, each.num_damaged, tier=each.tier)
            route = self._ways[each.tier][0]
            if not self._costs.has_seen(route):  # gives the planner a cost before the first read
                self._costs.observe_copy(route, each.num_bytes, each.seconds, self._clock())

    def lose(self, blocks: Sequence[BlockId], tier: str) -> None:
        """Stop using the copies that ``tier`` has of blocks."""
        is_named = blocks and tier in self._mover.storages
        keys = keys_of(self._index.names(blocks)) if is_named else [None] * len(blocks)
        for block, key in zip(blocks, keys, strict=True):
            self.lost.setdefault((block, tier), key)

    def drop_lost(self) -> None:
        """Forget lost copies that are not leased any more.

        Examines ``LOST_AT_ONCE`` copies; the next call begins with the others.
        """
        if not self.lost:
            self.is_dropping = False
            return
        to_drop: dict[str, list[BlockKey]] = {}
        num_before = len(self.lost)
        for (block, tier), key in list(islice(self.lost.items(), LOST_AT_ONCE)):
            del self.lost[block, tier]
            state = self._index.state(block, tier)
            if state is State.WRITING or (state is State.READY and not self._forget(block, tier)):
                self.lost[block, tier] = key  # at the end
                continue
            if key is not None:  # some rank or replica may still have it
                to_drop.setdefault(tier, []).append(key)
        for tier, keys in to_drop.items():
            self._mover.drop(tier, keys, for_good=True)
        self.is_dropping = 0 < len(self.lost) < num_before

    def _forget(self, block: BlockId, tier: str) -> bool:
        """Remove a block from a tier. Return False if it is leased."""
        if self._index.num_leases(block, tier):
            return False
        self.report(tier, [block], is_removed=True)
        slot = self._index.lose(block, tier)
        assert slot is not None, "it was not leased a moment ago"
        self._topology.allocators[tier].free([slot])
        return True

    def void(self) -> None:
        """Discard the blocks of transfers in flight, at the source and at the destination."""
        for transfer in self.in_flight.all:
            transfer.is_void = True
            self.lose(transfer.blocks, transfer.src)
            if transfer.dst != self._topology.device:
                self.lose(transfer.blocks, transfer.dst)

    def found(self, blocks: Sequence[BlockId], tier: str, slots: Sequence[Slot]) -> None:
        """Note blocks that were found in ``tier`` without a transfer, and mark them ready."""
        self._index.begin_write(blocks, tier, slots)
        self._index.commit(blocks, tier, self._clock())
        self.report(tier, blocks)

    def report(self, tier: str, blocks: Sequence[BlockId], is_removed: bool = False) -> None:
        """Report blocks that have entered ``tier``, or that leave it."""
        if self._on_change is not None and len(blocks):
            self._on_change(tier, blocks, is_removed)

    # -- costs ------------------------------------------------------------------------------------

    def cost_snapshot(self, is_free: bool = False) -> Costs:
        """Return current costs of copies and prefill, including the queued work.

        is_free: treat every load as free.
        """
        if is_free:
            return Costs(ways=self._ways)
        return self._costs.snapshot(
            self.queued_s(),
            self._ways,
            self._least_s,
            witnesses=self._topology.witnesses(),
            trial_bytes=self._block_bytes,
            now_s=self._clock(),
        )

    def queued_s(self) -> dict[Route, float]:
        """Return the queueing delay of a copy that begins now, per route towards the device."""
        expected_s = self._costs.expected_copy_s
        return {
            route: self._mover.queued_s(route, partial(expected_s, route)) for route in self._loads
        }

    def close(self) -> set[str]:
        """Finish the transfers in flight, as far as they end in time.

        Returns the tiers that are still in use afterwards.
        """
        while any(transfer.after is not None for transfer in self.in_flight.all):
            if not self.in_flight.wait(CLOSE_WAIT_S):
                break
            self.poll()
        hanging = self._mover.close(CLOSE_WAIT_S)
        if hanging:
            logger.warning("left behind tiers=%s after_s=%.0f", sorted(hanging), CLOSE_WAIT_S)
        while self.poll():
            pass
        return hanging


def _absent(transfer: Transfer, job: Job) -> Collection[int]:
    """Return the positions of the blocks that have not arrived."""
    if job.error is not None or transfer.is_void:
        return range(len(transfer.blocks))
    return job.lost
