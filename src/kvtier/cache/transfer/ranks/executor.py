"""In a rank: carries out the orders of the deciding process, in the background."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtier.cache.transfer.job import Job
from kvtier.cache.transfer.local import TIMEOUT_S, Blocks, LocalMover
from kvtier.cache.transfer.mover import FindJob, Move, Scrubbed, Warmed
from kvtier.cache.transfer.ranks.digests import keys_in
from kvtier.cache.transfer.ranks.messages import (
    Done,
    RankOrder,
    RecoveredBlocks,
    RecoveredKeys,
    Verb,
)
from kvtier.cache.transfer.ranks.recovery_reports import Telling
from kvtier.tiers import KeptKeys, MemoryTier, Outcome
from kvtier.tiers.breaker import BreakerState

logger = logging.getLogger(__name__)

LATE_S = 5.0
"""Grace period after a storage call's own time limit. If its thread hangs in the kernel the call
never fails by itself, so the rank reports it as late after this."""

LATE = Done(num_ranks=0, is_late=True)


@dataclass(slots=True)
class _PendingOrder:
    order: RankOrder
    job: Job
    since: float
    """When the order began, or when the last order of the same route ended."""
    is_late: bool = False

    @property
    def route(self) -> tuple[str, Verb]:
        return self.order.tier, self.order.verb


class RankExecutor:
    """Carries out orders of the deciding process in a rank. Owned by one thread.

    memory: the tier that blocks are copied from and to; orders name its slots.
    mover: moves the blocks within this process.
    kept: recovered keys, by storage tier of this rank's own.
    rank: number of this rank.
    num_ranks: ranks that have such storage.
    clock: seconds, to detect late orders.
    """

    def __init__(
        self,
        memory: MemoryTier,
        mover: LocalMover,
        kept: Mapping[str, KeptKeys],
        rank: int = 0,
        num_ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tellings = {name: Telling(name, rank, each, num_ranks) for name, each in kept.items()}
        self._is_telling = False  # some of these have more to report
        self._line: deque[RankOrder] = deque()  # orders that wait for a CLEAR
        self._rank = rank
        self._breakers = dict.fromkeys(mover.storages, BreakerState.CLOSED)
        self._clock = clock
        self._memory = memory
        self._mover = mover
        self._under_way: dict[int, _PendingOrder] = {}
        self._done: dict[int, Done] = {}

    def carry_out(self, order: RankOrder) -> None:
        """Begin an order. Orders for storage that this rank does not have are ignored."""
        if order.tier not in self._mover.storages:
            return
        if self._line or any(telling.is_clearing for telling in self._tellings.values()):
            self._line.append(order)
        else:
            self._carry_out(order)

    def _carry_out(self, order: RankOrder) -> None:
        keys = [name.key for name in order.names]
        match order.verb:
            case Verb.DROP | Verb.ERASE:
                self._mover.drop(order.tier, keys, for_good=order.verb is Verb.ERASE)
            case Verb.HURRY | Verb.WITHDRAW:
                self._turn(order)
            case Verb.READ | Verb.WRITE:
                self._begin(order)
            case Verb.FIND:
                job = self._mover.find(order.tier, keys_in(order.keys))
                self._under_way[order.order_id] = _PendingOrder(order, job, self._clock())
            case Verb.DIGEST | Verb.LIST | Verb.CLEAR:
                self._tellings[order.tier].begin(order)
                self._is_telling = True

    def _begin(self, order: RankOrder) -> None:
        if not all(0 <= slot < self._memory.num_slots for slot in order.slots):
            self._done[order.order_id] = Done(_all_of(order))
            return
        ends = (order.tier, self._memory.name)
        if order.verb is Verb.WRITE:
            ends = ends[::-1]
        move = Move(*ends, order.slots, order.slots, order.names)
        job = self._mover.begin(move, order.urgent)
        self._under_way[order.order_id] = _PendingOrder(order, job, self._clock())

    def read(self, order: RankOrder, blocks: Blocks) -> Job:
        """Begin a read order that came with a load of the engine's.

        blocks: the target memory. The job ends before its report is taken.
        """
        job = self._mover.read(order.tier, order.names, blocks, order.urgent)
        self._under_way[order.order_id] = _PendingOrder(order, job, self._clock())
        return job

    def _turn(self, order: RankOrder) -> None:
        """Hurry or withdraw a read that has not begun."""
        about = self._under_way.get(order.about)
        if about is None:
            return
        route = (order.tier, self._memory.name)
        if order.verb is Verb.HURRY:
            self._mover.hurry(route, about.job)
        else:
            self._mover.withdraw(route, about.job)

    # -- recovered blocks --------------------------------------------------------------------------

    def found(self) -> dict[str, RecoveredBlocks]:
        """Return the recovered blocks for the first report."""
        return {name: each.hello() for name, each in self._tellings.items()}

    def take_pieces(self) -> tuple[RecoveredKeys, ...]:
        """Return the part of the requested key list that fits into one report.

        Also continues to clear storage.
        """
        for name, each in self._tellings.items():
            if each.is_clearing:
                self._mover.drop(name, each.take_cleared(), for_good=True)
        while self._line and not any(telling.is_clearing for telling in self._tellings.values()):
            self._carry_out(self._line.popleft())
        pieces = [telling.take() for telling in self._tellings.values()]
        self._is_telling = any(telling.is_busy for telling in self._tellings.values())
        return tuple(piece for piece in pieces if piece is not None)

    # -- reports -----------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, nor waits for a report."""
        return not (self._under_way or self._done or self._line or self._is_telling)

    def take_done(self) -> dict[int, Done]:
        """Return the orders that have ended or become late since the last call, by id."""
        ended = [order_id for order_id, each in self._under_way.items() if each.job.done]
        for order_id in ended:
            each = self._under_way.pop(order_id)
            self._done[order_id] = _done(each)
            self._note_progress(each.route)
        for order_id, each in self._under_way.items():
            if not each.is_late and self._takes_too_long(each):
                each.is_late = True
                tier, verb = each.route
                level = logging.DEBUG if verb is Verb.FIND else logging.WARNING
                logger.log(level, "%s is late tier=%s order=%d", verb.value, tier, order_id)
                self._done[order_id] = LATE
        done, self._done = self._done, {}
        return done

    def _note_progress(self, route: tuple[str, Verb]) -> None:
        for each in self._under_way.values():
            if each.route == route and each.order.verb is not Verb.FIND:
                each.since = self._clock()

    def _takes_too_long(self, each: _PendingOrder) -> bool:
        limit_s = TIMEOUT_S[each.order.verb.value] + LATE_S
        if each.order.verb is Verb.FIND:  # the limit is the requests' patience
            limit_s = each.order.patience_s
        return self._clock() - each.since > limit_s

    def take_scrubbed(self) -> tuple[Scrubbed, ...]:
        """Return what idle storage has verified since the last call."""
        return tuple(self._mover.scrub())

    def take_warmed(self) -> tuple[Warmed, ...]:
        """Return what a warm start has copied since the last call."""
        return tuple(self._mover.warmed())

    def take_breakers(self) -> dict[tuple[int, str], BreakerState]:
        """Return the breaker states that changed since the last call."""
        now = {name: self._mover.breaker(name) for name in self._breakers}
        news = {(self._rank, name): now[name] for name in now if now[name] != self._breakers[name]}
        self._breakers = now
        return news

    def close(self, timeout_s: float) -> bool:
        """Finish what was begun. Return False on timeout: the tiers are still in use then."""
        return not self._mover.close(timeout_s)


def _done(ended: _PendingOrder) -> Done:
    job = ended.job
    if isinstance(job, FindJob):
        return _found(ended.order, job)
    failed = _all_of(ended.order) if job.error is not None else job.lost
    return Done(
        failed, job.gone, job.num_damaged, 1, job.num_bytes, job.seconds, withdrawn=job.withdrawn
    )


def _found(order: RankOrder, job: FindJob) -> Done:
    """Report a look-up's result, or its failure."""
    outcomes = job.outcomes
    if job.error is not None:
        outcomes = [Outcome.FAILED] * len(keys_in(order.keys))
    missing = [at for at, outcome in enumerate(outcomes) if outcome is not Outcome.THERE]
    gone = frozenset(at for at in missing if outcomes[at] is Outcome.ABSENT)
    return Done(frozenset(missing), gone, seconds=job.seconds)


def _all_of(order: RankOrder) -> frozenset[int]:
    return frozenset(range(len(order.names)))
