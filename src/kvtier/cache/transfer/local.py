"""Moves blocks in this process: a device copies between memories, threads access storage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import inf

from kvtier.cache.transfer.drops import OwedDrops, Unanswered
from kvtier.cache.transfer.engine import TransferEngine
from kvtier.cache.transfer.job import Job
from kvtier.cache.transfer.lane import Lane
from kvtier.cache.transfer.mover import FindJob, Move, Mover, Scrubbed, Warmed
from kvtier.cache.transfer.ring import Ring
from kvtier.cache.transfer.staging import stage, stage_steps
from kvtier.cache.transfer.warm_copier import WarmCopier
from kvtier.core.errors import TierError
from kvtier.core.types import BlockKey, BlockName, Slot, keys_of
from kvtier.devices import Device, Direction, Fence
from kvtier.plan import Route
from kvtier.tiers import MemoryTier, Outcome, Pieces, StorageFacts, StorageTier
from kvtier.tiers.breaker import Breaker, BreakerState
from kvtier.tiers.remote.warm_start import WarmStart

logger = logging.getLogger(__name__)

SCRUB_BYTES = 4 << 20
SCRUB_PAUSE_S = 1.0
"""Idle storage verifies ``SCRUB_BYTES`` per pause in the background: a terabyte in three days."""

TIMEOUT_S = {"find": 1.0, "read": 10.0, "write": 60.0}
"""Time limits of storage calls. A slower call counts as failed: its blocks are recomputed, or not
stored."""

FAILURES_UNTIL_OPEN = 3
"""Consecutive failed calls until the breaker opens; a single one may be chance."""

Call = Callable[[list[int] | None, float], list[Outcome]]
"""A storage call. Arguments: positions of the blocks (None for all), and its time limit in
seconds."""

Blocks = Callable[[], Pieces]
"""Returns the pieces of the blocks. Called on the worker thread that is about to read or write
them."""


class LocalMover(Mover):
    """Moves blocks between the tiers of this process.

    tiers: fastest first. The device copies between memory tiers; the first tier is the target of
    loads.
    device: None if no tier is device memory and nothing is copied between memories.
    clock: seconds, for scrubs and breakers.
    warm: what to copy from one storage tier into another in the background, from now on.
    """

    def __init__(
        self,
        tiers: Mapping[str, MemoryTier | StorageTier],
        device: Device | None,
        clock: Callable[[], float] = time.monotonic,
        warm: WarmStart | None = None,
    ) -> None:
        self._memories = {k: tier for k, tier in tiers.items() if isinstance(tier, MemoryTier)}
        self._storages = {k: tier for k, tier in tiers.items() if isinstance(tier, StorageTier)}
        self.storages = {name: tier.facts for name, tier in self._storages.items()}
        self._fastest = next(iter(tiers))
        self._device = device
        self._engine = None if device is None else TransferEngine(device)
        self._clock = clock
        self._drops = {name: OwedDrops(storage) for name, storage in self._storages.items()}
        self._unanswered = {name: Unanswered() for name in self._storages}
        self._drop_breakers = {name: Breaker(clock, FAILURES_UNTIL_OPEN) for name in self._storages}
        self._gates = {
            (name, way): _Gate(name, storage, way, num_workers, clock, self._drops[name])
            for name, storage in self._storages.items()
            for way, num_workers in _num_workers(storage.facts).items()
        }
        self._scrubs: dict[str, Job] = {}
        self._next_scrub_s = -inf
        self._is_closed = False
        self._ring = self._make_ring()
        self._warm = None if warm is None else WarmCopier(warm, self._storages, self._gates)

    def _make_ring(self) -> Ring | None:
        """Make a ring of host slots if storage below the first tier cannot write from it."""
        pool = self._memories.get(self._fastest)
        if pool is None or self._device is None or len(self._memories) > 1:
            return None
        kind = pool.memory.kind
        if all(facts.can_write_from(kind) for facts in self.storages.values()):
            return None
        return Ring(pool, self._device)

    def start(self) -> None:
        """Start the threads now: they inherit the cores of the calling thread."""
        if self._engine is not None:
            self._engine.start()
        for gate in self._gates.values():
            gate.lane.start()

    # -- moves -------------------------------------------------------------------------------------

    def begin(self, move: Move, urgent: bool = True) -> Job:
        src, dst = self._memories.get(move.src), self._memories.get(move.dst)
        if src is not None and dst is not None:
            assert self._engine is not None, "nobody copies between memories here"
            if move.dst == self._fastest:
                steps = stage_steps(src, move.src_slots, dst, move.dst_slots)
                return self._engine.submit(steps, Direction.LOAD)
            batch = stage(src, move.src_slots, dst, move.dst_slots)
            return self._engine.submit([batch], Direction.STORE)
        if dst is not None:
            return self.read(move.src, move.names, self._blocks(dst, move.dst_slots), urgent)
        assert src is not None, f"no way from {move.src} to {move.dst}"
        if self._ring is not None and not self.storages[move.dst].can_write_from(src.memory.kind):
            return self._begin_by_ring(self._ring, move, src, urgent)
        return self._put(move, self._blocks(src, move.src_slots), urgent)

    def read(
        self, tier: str, names: Sequence[BlockName], blocks: Blocks, urgent: bool = True
    ) -> Job:
        """Queue a read into the memory that ``blocks`` returns, which need not belong to a tier."""
        storage, keys = self._storages[tier], keys_of(names)

        def get(at: list[int] | None, timeout_s: float) -> list[Outcome]:
            if at is None:
                return storage.get(keys, blocks(), timeout_s)
            return storage.get([keys[each] for each in at], blocks().pick(at), timeout_s)

        return self._gates[tier, "read"].submit(get, keys, storage.bytes_per_block, urgent)

    def _put(self, move: Move, blocks: Blocks, urgent: bool) -> Job:
        """Queue a write. ``blocks`` is called on the worker thread."""
        storage, names = self._storages[move.dst], move.names

        def put(at: list[int] | None, timeout_s: float) -> list[Outcome]:
            if at is None:
                return storage.put(names, blocks(), timeout_s)
            return storage.put([names[each] for each in at], blocks().pick(at), timeout_s)

        gate = self._gates[move.dst, "write"]
        return gate.submit(put, keys_of(names), storage.bytes_per_block, urgent)

    def _begin_by_ring(self, ring: Ring, move: Move, src: MemoryTier, urgent: bool) -> Job:
        """Queue a copy to host memory, behind current device work, and a write from there.

        If the ring is full, the blocks are not written; nothing waits for room.
        """
        assert self._engine is not None, "a ring has a device that copies to it"
        slots = ring.take(len(move.src_slots))
        if slots is None:
            full = Job(0)
            full.finish(
                TierError(move.dst, "write", "the host memory that writes pass through is full")
            )
            return full
        copy = self._engine.submit([stage(src, move.src_slots, ring.tier, slots)], Direction.STORE)

        def after_copy() -> Pieces:
            if not copy.wait(TIMEOUT_S["write"]):
                raise TierError(move.dst, "write", "the copy to host memory takes too long")
            if copy.error is not None:
                raise copy.error
            return ring.pieces(slots)

        job = self._put(move, after_copy, urgent)
        # A late copy writes into the slots until it ends.
        job.when_done(lambda: copy.when_done(lambda: ring.give_back(slots)))
        return job

    def _blocks(self, memory: MemoryTier, slots: Sequence[Slot]) -> Blocks:
        """Return the pieces of blocks; for device memory, fenced behind its current work."""
        pieces = partial(memory.pieces, slots)
        if self._device is None or memory is not self._memories.get(self._fastest):
            return pieces
        return behind(self._device.fence(), pieces)

    def accepts(self, route: Route) -> bool:
        src, dst = route
        if self._is_closed or (dst in self._drops and self._drops[dst].is_full):
            return False
        gate = self._gates.get((src, "read")) or self._gates.get((dst, "write"))
        return gate is None or gate.breaker.is_passable

    def breaker(self, tier: str) -> BreakerState:
        gates = (gate.breaker.state for (name, _), gate in self._gates.items() if name == tier)
        return max(self._storages[tier].breaker, *gates)

    def hurry(self, route: Route, job: Job) -> None:
        gate = self._gates.get((route[0], "read"))
        if gate is not None:
            gate.lane.hurry(job)

    def withdraw(self, route: Route, job: Job) -> bool:
        gate = self._gates.get((route[0], "read"))
        return gate is not None and gate.lane.withdraw(job)

    def cancel(self, route: Route, jobs: Collection[Job]) -> bool:
        gate = self._gates.get((route[0], "read"))
        return gate is not None and gate.lane.cancel(jobs)

    def queued_s(self, route: Route, copy_s: Callable[[int], float]) -> float:
        gate = self._gates.get((route[0], "read"))
        if gate is None:
            if self._engine is None or route[1] != self._fastest:
                return 0.0
            return copy_s(self._engine.queued_bytes(Direction.LOAD))
        if not gate.breaker.is_passable:
            return inf
        # A disk that hangs looks as slow as it is.
        return max(copy_s(gate.lane.queued_bytes), gate.lane.running_s)

    # -- storage -----------------------------------------------------------------------------------

    def find(self, tier: str, keys: Sequence[BlockKey]) -> FindJob:
        storage, gate, job = self._storages[tier], self._gates[tier, "find"], FindJob()
        drops = self._drops[tier]
        if not storage.facts.finds_at_once:
            look = partial(gate.find, storage, keys, self._unanswered[tier])
            gate.lane.submit(look, 0, job=job)
            return job
        if self._drops_at_once(tier):
            self._send_drops(tier)
        outcomes: list[Outcome] = []
        try:
            outcomes = storage.find(keys, TIMEOUT_S["find"])
            job.outcomes = drops.left_out(keys, outcomes)
            job.finish()
        except Exception as caught:  # any error: nothing was found
            gate.lane.fail(job, caught)
        self._unanswered[tier].note(keys, outcomes)
        return job

    def num_known(self, tier: str, keys: Sequence[BlockKey]) -> int | None:
        """Return how many of the first keys a storage tier has; see ``StorageTier.num_known``."""
        num = self._storages[tier].num_known(keys)
        return None if num is None else min((num, *self.owed(tier, keys)))

    def has_unindexed(self, tier: str) -> bool:
        may_have = self._storages[tier].has_unindexed or len(self._unanswered[tier]) > 0
        return may_have and self._gates[tier, "find"].breaker.is_passable

    def drop(self, tier: str, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        if not self._is_closed:  # the lanes are stopped
            self._drops[tier].add(keys, for_good)
            self._unanswered[tier].forget(keys)
            self._send_drops(tier)

    def _send_drops(self, tier: str) -> None:
        """Make storage drop pending keys: at once, or in its queue if that may take time."""
        drops, gate = self._drops[tier], self._gates[tier, "find"]
        if not self._drops_at_once(tier):
            gate.lane.submit(gate.send_drops, 0)
            return
        breaker = self._drop_breakers[tier]
        if not len(drops) or not breaker.enter():
            return
        try:
            drops.send()
            breaker.note(True)
        except Exception as error:  # any error: retried later
            breaker.note(False)
            logger.warning("blocks were not dropped tier=%s error=%r", tier, error)

    def _drops_at_once(self, tier: str) -> bool:
        """Whether drops are sent without queueing: not if storage is shared or answers late."""
        facts = self.storages[tier]
        return facts.finds_at_once and not facts.is_shared

    def _send_drops_again(self) -> None:
        """Retry pending drops now rather than at the next look-up."""
        for tier, drops in self._drops.items():
            gate = self._gates[tier, "find"]
            if len(drops) and gate.lane.is_idle and gate.breaker.is_passable:
                self._send_drops(tier)

    def owed(self, tier: str, keys: Sequence[BlockKey]) -> frozenset[int]:
        """Return the positions of keys that a storage tier has yet to drop."""
        return self._drops[tier].places(keys)

    def num_owed(self, tier: str) -> int:
        """Return the number of keys that a storage tier has yet to drop."""
        return len(self._drops[tier])

    def drop_unindexed(self, tier: str) -> None:
        if unindexed := self._storages[tier].unindexed_keys():
            self.drop(tier, unindexed, for_good=True)

    def is_idle(self, tier: str) -> bool:
        return self._gates[tier, "read"].lane.is_idle

    def scrub(self) -> list[Scrubbed]:
        if not self._is_closed:
            self._send_drops_again()
        ended = [(name, job) for name, job in self._scrubs.items() if job.done]
        for name, _ in ended:
            del self._scrubs[name]
        if not self._is_closed and self._clock() >= self._next_scrub_s:
            self._begin_scrubs()
        return [
            Scrubbed(name, job.num_bytes, job.seconds, job.num_damaged)
            for name, job in ended
            if job.error is None and job.num_bytes
        ]

    def _begin_scrubs(self) -> None:
        for name, storage in self._storages.items():
            read, write = self._gates[name, "read"], self._gates[name, "write"]
            is_idle = read.lane.is_idle and write.lane.is_idle
            if storage.facts.wants_scrubbing and name not in self._scrubs and is_idle:
                self._next_scrub_s = self._clock() + SCRUB_PAUSE_S
                work = partial(_scrub, storage)
                self._scrubs[name] = read.lane.submit(work, SCRUB_BYTES, urgent=False)

    def warmed(self) -> Sequence[Warmed]:
        return [] if self._warm is None else self._warm.take()

    # -- end ---------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> set[str]:
        self._is_closed = True
        if self._warm is not None:
            self._warm.close()
        is_over = self._engine is None or self._engine.close(timeout_s)
        hanging = set() if is_over else set(self._memories)
        for (name, _), gate in self._gates.items():
            if not gate.lane.close(timeout_s):
                hanging.add(name)
        if self._warm is not None:
            self._warm.join()
        for name, drops in self._drops.items():
            if len(drops):
                logger.warning(
                    "blocks were not dropped, and may be found by the next process tier=%s num=%d",
                    name,
                    len(drops),
                )
        if self._ring is not None and not hanging:
            self._ring.close()
        if hanging & self._storages.keys():  # their calls may still access memory
            hanging.update(self._memories)
        return hanging


class _Gate:
    """One kind of call of a storage tier: its lane and its circuit breaker."""

    def __init__(
        self,
        tier: str,
        storage: StorageTier,
        way: str,
        num_workers: int,
        clock: Callable[[], float],
        drops: OwedDrops,
    ) -> None:
        self._storage = storage
        self._drops = drops
        self._is_write = way == "write"
        self.lane = Lane(f"{tier} {way}", partial(TierError, tier, way), num_workers)
        self._timeout_s = TIMEOUT_S[way]
        self.breaker = Breaker(clock, FAILURES_UNTIL_OPEN, trial_s=2 * self._timeout_s)

    def submit(self, call: Call, keys: Sequence[BlockKey], block_bytes: int, urgent: bool) -> Job:
        """Queue ``call``, a get or put of ``keys``."""
        return self.lane.submit(partial(self._move, call, keys), len(keys) * block_bytes, urgent)

    def _move(self, call: Call, keys: Sequence[BlockKey], job: Job) -> Iterable[int]:
        everything = frozenset(range(len(keys)))
        owed = self._drops.places(keys)
        if self._is_write and self._drops.is_full:
            owed = everything
        if not self._is_write:
            job.gone = owed
        at = sorted(everything - owed)
        if not at or not self.breaker.enter():
            return everything
        outcomes = self._ask(lambda: call(at if owed else None, self._timeout_s))
        damaged = _where(outcomes, Outcome.DAMAGED)
        gone = damaged | _where(outcomes, Outcome.ABSENT)
        job.gone, job.num_damaged = job.gone | {at[each] for each in gone}, len(damaged)
        return job.gone | owed | {at[each] for each in _where(outcomes, Outcome.FAILED)}

    def find(
        self, storage: StorageTier, keys: Sequence[BlockKey], unanswered: Unanswered, job: Job
    ) -> Iterable[int]:
        """Look up keys. Pending drops are sent first, so that dropped keys are not found."""
        assert isinstance(job, FindJob)

        def look() -> list[Outcome]:
            self._drops.send()
            return storage.find(keys, self._timeout_s)

        if not self.breaker.enter():
            return range(len(keys))
        outcomes: list[Outcome] = []
        try:
            outcomes = self._ask(look)
        finally:
            unanswered.note(keys, outcomes)
        job.outcomes = self._drops.left_out(keys, outcomes)
        return _where(job.outcomes, Outcome.FAILED)

    def send_drops(self, job: Job) -> Iterable[int]:
        """Make storage drop pending keys; keys that it does not drop stay pending."""
        del job

        def send() -> list[Outcome]:
            self._drops.send()
            return [Outcome.THERE]

        if len(self._drops) and self.breaker.enter():
            self._ask(send)
        return ()

    def _ask(self, call: Callable[[], list[Outcome]]) -> list[Outcome]:
        """Make a call that the breaker let through, and record its outcome."""
        outcomes: list[Outcome] = []
        error = ""
        try:
            outcomes = call()
        except Exception as raised:
            error = str(raised) or type(raised).__name__
            raise
        finally:
            answered = any(outcome is not Outcome.FAILED for outcome in outcomes)
            if self.breaker.note(answered):
                if answered:
                    logger.warning("storage calls work again lane=%s", self.lane.name)
                else:
                    logger.warning(
                        "storage calls are paused lane=%s error=%r",
                        self.lane.name,
                        error or self._storage.last_error or "no answer",
                    )
        return outcomes


def behind(fence: Fence, blocks: Blocks) -> Blocks:
    """Return ``blocks``, delayed until the compute queued before ``fence`` is done.

    That compute may still read or write this memory, and a stream does not order storage I/O.
    """

    def after_compute() -> Pieces:
        fence.wait()
        return blocks()

    return after_compute


def _where(outcomes: Sequence[Outcome], wanted: Outcome) -> frozenset[int]:
    return frozenset(at for at, outcome in enumerate(outcomes) if outcome is wanted)


def _num_workers(facts: StorageFacts) -> dict[str, int]:
    return {"read": facts.num_readers, "write": facts.num_writers, "find": 1}


def _scrub(storage: StorageTier, job: Job) -> Iterable[int]:
    report = storage.scrub(SCRUB_BYTES)
    job.num_bytes, job.num_damaged = report.num_bytes, report.num_damaged
    return ()
