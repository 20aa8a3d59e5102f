"""In the deciding process: turns moves into orders to ranks, and their reports into ended jobs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from kvtier.cache.transfer.job import Job
from kvtier.cache.transfer.local import FAILURES_UNTIL_OPEN, TIMEOUT_S
from kvtier.cache.transfer.mover import FindJob, Move, Mover, Scrubbed, Warmed
from kvtier.cache.transfer.ranks.adoption import Adoption
from kvtier.cache.transfer.ranks.messages import (
    Done,
    Hello,
    RankOrder,
    RecoveredBlocks,
    Report,
    Verb,
)
from kvtier.core.types import BlockKey, BlockName, Direct, Slot
from kvtier.plan import Route
from kvtier.tiers import Outcome, StorageFacts
from kvtier.tiers.breaker import Breaker, BreakerState


@dataclass(slots=True)
class _Moving:
    job: Job
    route: Route
    num_bytes: int
    num_ranks_left: int
    done: Done | None = None


@dataclass(slots=True)
class _Finding:
    """A look-up by the ranks. num_ranks: how many have to answer."""

    job: FindJob
    tier: str
    num_keys: int
    num_ranks: int
    done: Done | None = None


@dataclass(slots=True)
class _Line:
    """Traffic of one route."""

    num_moves: int = 0
    num_bytes: int = 0
    num_late: int = 0

    def count(self, num_moves: int, num_bytes: int) -> None:
        self.num_moves += num_moves
        self.num_bytes += num_bytes


class RankMover(Mover):
    """Moves blocks by orders to ranks. A move is done when every rank has reported it.

    A block that one rank could not move counts as not moved. While a rank is late with a move, its
    slots stay in use, and further moves along the same route are refused.

    Ranks report by themselves the blocks that their own storage recovered. A store has to be
    queried: each rank looks up its shard, and a block is found if all ranks found it.

    Args:
        storages: storage tiers of each rank; tiers that do not find at once are queried.
        block_bytes: bytes of a block in one rank.
        num_ranks: ranks that send a hello.
        num_storage_ranks: how many of them have the storage.
        lookup_patience_s: time after which ranks report a look-up as late.
        device: tier of the engine's memory, whose slots the engine itself knows: a read order to it
            is sent with the engine's own load.
    """

    tells_late = True

    def __init__(
        self,
        storages: Mapping[str, StorageFacts],
        block_bytes: int,
        num_ranks: int,
        num_storage_ranks: int,
        lookup_patience_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        device: str | None = None,
    ) -> None:
        self.storages = dict(storages)
        self._device = device
        self._lookup_patience_s = lookup_patience_s
        self._block_bytes = block_bytes
        self._num_ranks = num_ranks
        self._num_storage_ranks = num_storage_ranks if storages else 0
        self._hellos: dict[int, Hello] = {}
        self._orders: list[RankOrder] = []
        self._reads: list[RankOrder] = []  # to the device
        self._moving: dict[int, _Moving] = {}
        self._lines: defaultdict[Route, _Line] = defaultdict(_Line)
        self._ids: dict[Job, int] = {}
        self._num_orders = 0
        self._scrubbed: list[Scrubbed] = []
        self._warmed: list[Warmed] = []
        self._told_breakers: dict[tuple[int, str], BreakerState] = {}
        self._adoptions = {
            name: Adoption(num_storage_ranks, partial(self._order, tier=name))
            for name, facts in storages.items()
            if facts.finds_at_once
        }
        self._finding: dict[int, _Finding] = {}
        self._num_late_finds = 0
        self._breakers = {
            (name, verb): Breaker(clock, FAILURES_UNTIL_OPEN, 2 * TIMEOUT_S[verb.value])
            for name in storages
            for verb in (Verb.FIND, Verb.READ, Verb.WRITE)
            if name not in self._adoptions
        }

    # -- calls of the ladder -----------------------------------------------------------------------

    def begin(self, move: Move, urgent: bool = True) -> Job:
        is_read = move.src in self.storages
        tier, slots = (move.src, move.dst_slots) if is_read else (move.dst, move.src_slots)
        job = Job(move.num_blocks * self._block_bytes)
        verb = Verb.READ if is_read else Verb.WRITE
        if (tier, verb) in self._breakers and not self._breakers[tier, verb].enter():
            job.finish(lost=range(move.num_blocks))
            return job
        if not is_read:
            self._touch(tier, [name.key for name in move.names])
        line = self._reads if move.dst == self._device else self._orders
        order = self._order(verb, tier, move.names, tuple(slots), urgent, line=line)
        route = (move.src, move.dst)
        self._moving[order.order_id] = _Moving(job, route, job.num_bytes, self._num_storage_ranks)
        self._lines[route].count(+1, job.num_bytes)
        self._ids[job] = order.order_id
        return job

    def drop(self, tier: str, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        self._touch(tier, keys)
        if keys:
            names = [BlockName(b"", 0, key) for key in keys]
            self._order(Verb.ERASE if for_good else Verb.DROP, tier, names)

    def _touch(self, tier: str, keys: Sequence[BlockKey]) -> None:
        if tier in self._adoptions:
            self._adoptions[tier].touch(keys)

    def accepts(self, route: Route) -> bool:
        breaker = self._breaker(route)
        is_passable = breaker is None or breaker.is_passable
        return is_passable and not self._lines[route].num_late

    def breaker(self, tier: str) -> BreakerState:
        ours = [each.state for (name, _), each in self._breakers.items() if name == tier]
        theirs = [each for (_, name), each in self._told_breakers.items() if name == tier]
        return max(ours + theirs, default=BreakerState.CLOSED)

    def _breaker(self, route: Route) -> Breaker | None:
        """Return the breaker of the store that the route reads from or writes to."""
        src, dst = route
        reads = self._breakers.get((src, Verb.READ))
        return reads or self._breakers.get((dst, Verb.WRITE))

    def hurry(self, route: Route, job: Job) -> None:
        if job in self._ids:
            self._order(Verb.HURRY, route[0], about=self._ids[job])

    def withdraw(self, route: Route, job: Job) -> bool:
        """Order the ranks to withdraw; their reports show whether it was in time."""
        if job in self._ids:
            self._order(Verb.WITHDRAW, route[0], about=self._ids[job])
        return False

    def find(self, tier: str, keys: Sequence[BlockKey]) -> FindJob:
        """Look up keys on all ranks.

        In a store, the ranks look them up. Otherwise the job is done at once and holds the keys
        that all ranks are known to have and that no look-up has found yet; a key counts as absent
        until then.
        """
        job = FindJob()
        if tier not in self._adoptions:
            self._begin_find(job, tier, keys)
            return job
        there = self._adoptions[tier].find(keys)
        job.outcomes = [Outcome.THERE if each else Outcome.ABSENT for each in there]
        job.finish()
        return job

    def _begin_find(self, job: FindJob, tier: str, keys: Sequence[BlockKey]) -> None:
        if not self._breakers[tier, Verb.FIND].enter():
            job.outcomes = [Outcome.FAILED] * len(keys)
            job.finish(lost=range(len(keys)))
            return
        content, patience_s = b"".join(keys), self._lookup_patience_s
        order = self._order(Verb.FIND, tier, keys=content, patience_s=patience_s)
        self._finding[order.order_id] = _Finding(job, tier, len(keys), self._num_storage_ranks)

    def has_unindexed(self, tier: str) -> bool:
        if tier not in self._adoptions:
            return self._breakers[tier, Verb.FIND].is_passable
        return self._adoptions[tier].num_unindexed > 0

    def drop_unindexed(self, tier: str) -> None:
        """Drop all recovered blocks, including blocks that ranks have not reported yet.

        Does nothing for a store, whose blocks are shared.
        """
        if tier not in self._adoptions:
            return
        adoption = self._adoptions[tier]
        if adoption.num_unindexed or not adoption.is_complete:
            self._order(Verb.CLEAR, tier)
        adoption.forget()

    def queued_s(self, route: Route, copy_s: Callable[[int], float]) -> float:
        if not self.accepts(route):
            return inf
        return copy_s(self._lines[route].num_bytes if route[0] in self.storages else 0)

    def is_idle(self, tier: str) -> bool:
        return not any(line.num_moves for (src, _), line in self._lines.items() if src == tier)

    def scrub(self) -> list[Scrubbed]:
        scrubbed, self._scrubbed = self._scrubbed, []
        return scrubbed

    def warmed(self) -> list[Warmed]:
        warmed, self._warmed = self._warmed, []
        return warmed

    def close(self, timeout_s: float) -> set[str]:
        """Do nothing: the ranks close their tiers."""
        return set()

    def _order(
        self,
        verb: Verb,
        tier: str,
        names: Sequence[BlockName] = (),
        slots: tuple[Slot, ...] = (),
        urgent: bool = True,
        about: int = 0,
        ranks: tuple[int, ...] = (),
        num: int = 0,
        buckets: tuple[int, bytes] | None = None,
        keys: bytes = b"",
        patience_s: float = 0.0,
        line: list[RankOrder] | None = None,
    ) -> RankOrder:
        """Make an order, and queue it in ``line``, by default with all others."""
        self._num_orders += 1
        order = RankOrder(
            self._num_orders, verb, tier, tuple(names), slots, urgent, about, ranks, num, buckets,
            keys, patience_s,
        )  # fmt: skip
        (self._orders if line is None else line).append(order)
        return order

    # -- messages in the engine's own -------------------------------------------------------------

    def take_orders(self) -> list[RankOrder]:
        """Return the next orders for the ranks, in order; none until all have sent their hello."""
        if not (self._orders or self._is_erasing) or not self._has_heard_all:
            return []
        for tier, adoption in self._adoptions.items():
            if erased := adoption.take_erased():
                names = [BlockName(b"", 0, key) for key in erased]
                self._order(Verb.ERASE, tier, names)
        orders, self._orders = self._orders, []
        return orders

    def take_reads(self) -> list[RankOrder]:
        """Return the new read orders to the device, which go with the engine's own loads."""
        reads, self._reads = self._reads, []
        return reads

    @property
    def _has_heard_all(self) -> bool:
        """Whether every rank has sent its hello."""
        adoptions = self._adoptions.values()
        has_heard = all(adoption.has_heard_all for adoption in adoptions)
        return has_heard and len(self._hellos) >= self._num_ranks

    @property
    def is_complete(self) -> bool:
        """Whether every rank has reported all it recovered."""
        return self._has_heard_all and all(
            adoption.is_complete for adoption in self._adoptions.values()
        )

    @property
    def is_busy(self) -> bool:
        """Whether orders are waiting to be sent or carried out; late ones do not count."""
        is_waited_for = any(line.num_moves > line.num_late for line in self._lines.values())
        is_waited_for |= len(self._finding) > self._num_late_finds
        return bool(self._orders) or is_waited_for or self._is_erasing

    @property
    def _is_erasing(self) -> bool:
        return any(adoption.has_to_erase for adoption in self._adoptions.values())

    @property
    def num_open(self) -> int:
        """Slots in memory that every rank has open."""
        if len(self._hellos) < self._num_ranks:
            return 0
        return min(hello.num_open for hello in self._hellos.values())

    def num_blocks(self, tier: str) -> int | None:
        """Return the number of blocks that every rank has room for in a storage tier.

        Ranks may have shards of different sizes, so equal bytes hold different numbers of blocks.
        None while no rank has reported its room.
        """
        reported = (hello.num_blocks.get(tier) for hello in self._hellos.values())
        return min((num for num in reported if num is not None), default=None)

    def hear(self, report: Report) -> None:
        """Handle reports of ranks. Each rank reports an order once, when it has ended there."""
        for rank, hello in report.hellos.items():
            self._hellos[rank] = hello
            if hello.found is not None:
                for tier, adoption in self._adoptions.items():
                    adoption.hello(rank, hello.found.get(tier, RecoveredBlocks()))
                for tier in self.storages.keys() - hello.direct:  # all ranks must support it
                    self.storages[tier] = replace(self.storages[tier], direct=Direct.OFF)
        for piece in report.pieces:
            self._adoptions[piece.tier].hear(piece)
        self._scrubbed += report.scrubbed
        self._warmed += report.warmed
        self._told_breakers.update(report.breakers)
        for order_id, done in report.done.items():
            self._note(order_id, done)

    def _note(self, order_id: int, done: Done) -> None:
        if order_id in self._finding:
            self._note_found(order_id, done)
        moving = self._moving.get(order_id)
        if moving is None:
            return
        if done.is_late and not moving.job.is_late:
            moving.job.is_late = True
            self._lines[moving.route].num_late += 1
        if not done.num_ranks:
            return
        moving.done = done if moving.done is None else moving.done.and_also(done)
        moving.num_ranks_left -= done.num_ranks
        if moving.num_ranks_left > 0:
            return
        del self._moving[order_id]
        del self._ids[moving.job]
        self._lines[moving.route].count(-1, -moving.num_bytes)
        self._lines[moving.route].num_late -= moving.job.is_late
        all_done, job = moving.done, moving.job
        if (breaker := self._breaker(moving.route)) is not None and not all_done.withdrawn:
            num_blocks = moving.num_bytes // self._block_bytes
            breaker.note(len(all_done.failed - all_done.gone) < num_blocks)
        job.gone, job.num_damaged = all_done.gone, all_done.num_damaged
        job.withdrawn = all_done.withdrawn
        job.num_bytes = all_done.num_bytes
        job.finish(lost=all_done.failed)
        job.seconds = all_done.seconds

    def _note_found(self, order_id: int, done: Done) -> None:
        """Record what some ranks found, or that their look-up is late."""
        finding = self._finding[order_id]
        job = finding.job
        if done.is_late and not job.is_late:
            job.is_late = True
            self._num_late_finds += 1
        if not done.num_ranks:
            return
        finding.done = done if finding.done is None else finding.done.and_also(done)
        if finding.done.num_ranks < finding.num_ranks:
            return
        del self._finding[order_id]
        self._num_late_finds -= job.is_late
        failed, gone = finding.done.failed, finding.done.gone
        job.outcomes = [
            Outcome.THERE if at not in failed else Outcome.ABSENT if at in gone else Outcome.FAILED
            for at in range(finding.num_keys)
        ]
        self._breakers[finding.tier, Verb.FIND].note(len(failed - gone) < finding.num_keys)
        job.finish(lost=failed - gone)
        job.seconds = finding.done.seconds
