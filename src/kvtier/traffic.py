"""Copies between tiers: begun, noticed when they end, and what came of them told to the index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress, pairwise
from math import inf

from kvtier.devices import Device, Direction
from kvtier.errors import TierError
from kvtier.index import BlockIndex, State
from kvtier.plan import Copy, CostModel, Costs
from kvtier.telemetry import Metrics
from kvtier.tiers import Addresses, LoadResult, MemoryTier, StorageTier, Tier
from kvtier.transfer import Job, Lane, TransferEngine, stage, stage_steps
from kvtier.types import DEVICE, BlockId, BlockKey, BlockName, Slot
from kvtier.waiter import Transfer

logger = logging.getLogger(__name__)

SCRUB_BYTES = 4 << 20
SCRUB_PAUSE_S = 1.0
"""So much is verified in the background at a time, where storage is idle, and so seldom: a disk of
a terabyte in three days."""
CLOSE_WAIT_S = 10.0
"""How long copies may take to finish at the end."""


class Traffic:
    """All transfers that are not finished. Owned by the cache's thread; workers do the copying.

    A transfer may have to wait for the one that brings its sources: a load from disk is a copy to
    host memory and, after it, one to the device.
    """

    def __init__(
        self,
        tiers: dict[str, Tier],
        index: BlockIndex,
        device: Device,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._index = index
        self._metrics = metrics
        self._clock = clock
        self.costs = CostModel()
        self._engine = TransferEngine(device)
        self._lanes = {
            (name, way): Lane(f"{name} {way}", partial(TierError, name, way))
            for name, tier in tiers.items()
            if isinstance(tier, StorageTier)
            for way in ("read", "write")
        }
        self.transfers: list[Transfer] = []
        self._lost: set[tuple[BlockId, str]] = set()
        self._scrubs: dict[str, Job] = {}
        self._next_scrub_s = -inf

    # -- begin ------------------------------------------------------------------------------------

    def begin(
        self,
        copy: Copy,
        dst_slots: Sequence[Slot],
        after: Transfer | None = None,
        urgent: bool = True,
    ) -> Transfer:
        """Begin to copy into ``dst_slots``. The sources can't leave until the copy is finished.

        after: the transfer that brings the sources, if they are on their way themselves.
        urgent: False for a read that nobody waits for yet; it lets others pass.
        """
        self._index.begin_write_all(copy.blocks, copy.dst, dst_slots)
        transfer = Transfer(copy.src, copy.dst, copy.blocks, after)
        self.transfers.append(transfer)
        if after is None:
            self._submit(transfer, urgent)
        return transfer

    def hurry(self, transfer: Transfer) -> None:
        """Somebody waits for a read now that nobody waited for when it began."""
        if transfer.job is not None and (lane := self._lanes.get((transfer.src, "read"))):
            lane.hurry(transfer.job)

    def withdraw(self, transfer: Transfer) -> None:
        """Nobody wants the transfer any more: end it, unless it is under way or others want it."""
        if transfer.job is None or transfer.waiters:
            return
        lane = self._lanes.get((transfer.src, "read"))
        if lane is not None and lane.withdraw(transfer.job):
            self.finish(transfer)

    def refuse(self, copy: Copy, reason: str) -> Transfer:
        """A transfer that has failed already: the next ``poll`` notices, and whoever waits."""
        job = Job(0)
        job.finish(TierError(copy.dst, "load", reason))
        transfer = Transfer(copy.src, copy.dst, (), job=job)
        self.transfers.append(transfer)
        return transfer

    def _submit(self, transfer: Transfer, urgent: bool = True) -> None:
        """The sources are there: queue the copy."""
        blocks = transfer.blocks
        states = self._index.states_of(blocks, transfer.src)
        if all(state is State.READY for state in states):
            self._index.lease(blocks, transfer.src)
            transfer.holds_source = True
        src, dst = self._tiers[transfer.src], self._tiers[transfer.dst]
        src_slots = self._index.slots(blocks, transfer.src)
        dst_slots = self._index.slots(blocks, transfer.dst)
        if isinstance(src, MemoryTier) and isinstance(dst, MemoryTier):
            if transfer.dst == DEVICE:
                steps = stage_steps(src, src_slots, dst, dst_slots)
                transfer.layers_per_step = steps.layers_per_step
                transfer.job = self._engine.submit(steps, Direction.LOAD)
            else:
                batch = stage(src, src_slots, dst, dst_slots)
                transfer.job = self._engine.submit([batch], Direction.STORE)
        elif isinstance(src, StorageTier) and isinstance(dst, MemoryTier):
            keys = [self._index.key(block) for block in blocks]
            work = partial(_read, src, keys, src_slots, dst.addresses(dst_slots))
            transfer.job = self._lanes[src.name, "read"].submit(
                work, len(blocks) * src.bytes_per_block, urgent
            )
        elif isinstance(src, MemoryTier) and isinstance(dst, StorageTier):
            names = [self._index.name(block) for block in blocks]
            work = partial(_write, dst, names, dst_slots, src.addresses(src_slots))
            transfer.job = self._lanes[dst.name, "write"].submit(
                work, len(blocks) * dst.bytes_per_block
            )
        else:
            raise AssertionError(f"no way from {transfer.src} to {transfer.dst}")

    # -- end --------------------------------------------------------------------------------------

    def poll(self) -> list[Transfer]:
        """Finish the transfers whose copy is done, and give them. Never waits."""
        finished = [each for each in self.transfers if each.job is not None and each.job.done]
        for transfer in finished:
            self.finish(transfer)
        return finished

    def finish(self, transfer: Transfer) -> None:
        """What arrived is ready, what did not is absent; then those that waited are told."""
        job = transfer.job
        assert job is not None
        self.transfers.remove(transfer)
        src, dst, blocks, now = transfer.src, transfer.dst, transfer.blocks, self._clock()
        arrived = [at not in job.lost and job.error is None for at in range(len(blocks))]
        self._index.commit_all(list(compress(blocks, arrived)), dst, now)
        if job.error is None:
            self.costs.observe_copy((src, dst), job.num_bytes, job.seconds)
            self._metrics.count("kvtier_copied_bytes_total", job.num_bytes, src=src, dst=dst)
            self._metrics.observe("kvtier_copy_seconds", job.seconds, src=src, dst=dst)
        if not job.succeeded and not job.withdrawn:
            self._metrics.count("kvtier_failed_copies_total", src=src, dst=dst)
        for waiter in list(transfer.waiters):
            if job.succeeded:
                waiter.arrived(transfer, now)
            else:
                waiter.failed(transfer)
        if transfer.holds_source:
            self._index.release(blocks, src)
        absent = [block for block, is_there in zip(blocks, arrived, strict=True) if not is_there]
        self._tiers[dst].free(self._index.abort_all(absent, dst))
        if job.error is None and isinstance(self._tiers[src], StorageTier):
            self._metrics.count("kvtier_damaged_blocks_total", len(absent), tier=src)
            self._lost.update((block, src) for block in absent)
        for follower in [each for each in self.transfers if each.after is transfer]:
            self._follow(follower, transfer)

    def _follow(self, follower: Transfer, leader: Transfer) -> None:
        """``leader`` has ended: the transfer after it begins, or fails with it."""
        assert leader.job is not None
        follower.after = None
        if leader.job.succeeded:
            self._submit(follower)
        else:
            follower.job = Job(0)
            follower.job.finish(TierError(follower.src, "load", "the block did not arrive there"))
            self.finish(follower)

    def scrub(self) -> None:
        """Have storage that is idle verify a few blocks, now and then. Never waits."""
        for name, job in list(self._scrubs.items()):
            if job.done:
                del self._scrubs[name]
                self._note_scrub(name, job)
        if self._clock() < self._next_scrub_s:
            return
        for name, tier in self._tiers.items():
            if not isinstance(tier, StorageTier) or name in self._scrubs:
                continue
            if self.is_idle(name) and self._lanes[name, "write"].is_idle:
                self._next_scrub_s = self._clock() + SCRUB_PAUSE_S
                lane = self._lanes[name, "read"]
                self._scrubs[name] = lane.submit(partial(_scrub, tier), SCRUB_BYTES, urgent=False)

    def _note_scrub(self, name: str, job: Job) -> None:
        if job.error is not None or not job.num_bytes:
            return
        self._metrics.count("kvtier_scrubbed_bytes_total", job.num_bytes, tier=name)
        self._metrics.count("kvtier_damaged_blocks_total", len(job.lost), tier=name)
        names = list(self._tiers)
        route = (name, names[names.index(name) - 1])
        if not self.costs.has_seen(route):  # the planner knows what a read costs before the first
            self.costs.observe_copy(route, job.num_bytes, job.seconds)

    def drop_lost(self) -> None:
        """Forget blocks that their tier could not give back, once nobody holds them any more."""
        for block, tier in list(self._lost):
            if self._index.state(block, tier) is State.READY:
                slot = self._index.lose(block, tier)
                if slot is None:
                    continue
                self._tiers[tier].free([slot])
            self._lost.discard((block, tier))

    # -- look -------------------------------------------------------------------------------------

    def bringing(self, blocks: Iterable[BlockId], dst: str) -> list[Transfer]:
        """Transfers that bring one of ``blocks`` to ``dst``."""
        wanted = set(blocks)
        return [
            each
            for each in self.transfers
            if each.dst == dst and not wanted.isdisjoint(each.blocks)
        ]

    def is_idle(self, tier: str) -> bool:
        """Whether nothing is read from a storage tier, and nothing stands in line for it."""
        return self._lanes[tier, "read"].is_idle

    def wait(self, timeout_s: float) -> bool:
        """Wait until the oldest transfer is done, or there is none. False on time-out."""
        job = next((each.job for each in self.transfers if each.job is not None), None)
        return job is None or job.wait(timeout_s)

    def cost_snapshot(self) -> Costs:
        """What copies and prefill cost now, with the work that stands in line before a new one."""
        costs, queued_s = self.costs.snapshot(), {}
        for slow, fast in pairwise(reversed(self._tiers)):
            lane = self._lanes.get((slow, "read"))
            if lane is not None:  # a disk that hangs looks as slow as it is
                line_s = costs.copy_s((slow, fast), lane.queued_bytes)
                queued_s[slow, fast] = max(line_s, lane.running_s)
            elif fast == DEVICE:
                queued_bytes = self._engine.queued_bytes(Direction.LOAD)
                queued_s[slow, fast] = costs.copy_s((slow, fast), queued_bytes)
        return self.costs.snapshot(queued_s, tuple(self._tiers))

    def close(self) -> set[str]:
        """Finish what is on its way, as far as it ends in time. Returns the tiers with work that
        did not: they are still in use."""
        while any(each.after is not None for each in self.transfers):
            if not self.wait(CLOSE_WAIT_S):
                break
            self.poll()
        hanging: set[str] = set()
        if not self._engine.close(CLOSE_WAIT_S):
            hanging |= {name for name, tier in self._tiers.items() if isinstance(tier, MemoryTier)}
        hanging |= {name for (name, _), lane in self._lanes.items() if not lane.close(CLOSE_WAIT_S)}
        if hanging:
            logger.warning("left behind tiers=%s after_s=%.0f", sorted(hanging), CLOSE_WAIT_S)
        self.poll()
        return hanging


def _read(
    tier: StorageTier, keys: Sequence[BlockKey], slots: Sequence[Slot], to: Addresses, job: Job
) -> list[int]:
    del job  # what waits in line is counted by its lane
    results = tier.load(keys, slots, to)
    return [at for at, result in enumerate(results) if result is not LoadResult.OK]


def _scrub(tier: StorageTier, job: Job) -> tuple[int, ...]:
    """Gives the slots that it found damaged."""
    report = tier.scrub(SCRUB_BYTES)
    job.num_bytes = report.num_bytes
    return (*report.corrupt, *report.failed)


def _write(
    tier: StorageTier, names: Sequence[BlockName], slots: Sequence[Slot], of: Addresses, job: Job
) -> list[int]:
    del job
    return [at for at, is_there in enumerate(tier.store(names, slots, of)) if not is_there]
