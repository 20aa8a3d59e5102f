"""In the deciding process: moves become orders to the ranks, and reports become ended jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from kvtier.plan import Route
from kvtier.tiers import Outcome, StorageFacts
from kvtier.transfer.job import Job
from kvtier.transfer.mover import FindJob, Move, Mover, Scrubbed
from kvtier.transfer.ranks.adoption import Adoption
from kvtier.transfer.ranks.messages import Done, Found, Hello, Order, Report, Verb
from kvtier.types import BlockKey, BlockName, Slot


@dataclass(slots=True)
class _Moving:
    job: Job
    route: Route
    num_bytes: int
    num_ranks_left: int
    done: Done | None = None


@dataclass(slots=True)
class _Line:
    """What moves along one route."""

    num_moves: int = 0
    num_bytes: int = 0
    num_late: int = 0

    def count(self, num_moves: int, num_bytes: int) -> None:
        self.num_moves += num_moves
        self.num_bytes += num_bytes


class RankMover(Mover):
    """A move is done when every rank has said so; what one rank could not move has not moved.

    While a rank is late with a move, its slots stay in use, and no more moves along the same route
    are accepted.

    storages: what each rank has of storage. block_bytes: of one rank. num_ranks: that say hello.
    num_storage_ranks: those of them that have the storage.
    """

    def __init__(
        self,
        storages: Mapping[str, StorageFacts],
        block_bytes: int,
        num_ranks: int,
        num_storage_ranks: int,
    ) -> None:
        self.storages = dict(storages)
        self._block_bytes = block_bytes
        self._num_ranks = num_ranks
        self._num_storage_ranks = num_storage_ranks if storages else 0
        self._hellos: dict[int, Hello] = {}
        self._orders: list[Order] = []
        self._moving: dict[int, _Moving] = {}
        self._lines: defaultdict[Route, _Line] = defaultdict(_Line)
        self._ids: dict[Job, int] = {}
        self._num_orders = 0
        self._scrubbed: list[Scrubbed] = []
        self._adoptions = {
            name: Adoption(num_storage_ranks, partial(self._ask, name)) for name in storages
        }

    # -- what the ladder wants ---------------------------------------------------------------------

    def begin(self, move: Move, urgent: bool = True) -> Job:
        is_read = move.src in self.storages
        tier, slots = (move.src, move.dst_slots) if is_read else (move.dst, move.src_slots)
        job = Job(move.num_blocks * self._block_bytes)
        if not is_read:
            self._adoptions[tier].touch([name.key for name in move.names])
        verb = Verb.READ if is_read else Verb.WRITE
        order = self._order(verb, tier, move.names, tuple(slots), urgent)
        route = (move.src, move.dst)
        self._moving[order.order_id] = _Moving(job, route, job.num_bytes, self._num_storage_ranks)
        self._lines[route].count(+1, job.num_bytes)
        self._ids[job] = order.order_id
        return job

    def drop(self, tier: str, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        self._adoptions[tier].touch(keys)
        if keys:
            names = [BlockName(b"", 0, key) for key in keys]
            self._order(Verb.ERASE if for_good else Verb.DROP, tier, names)

    def accepts(self, route: Route) -> bool:
        return not self._lines[route].num_late

    def hurry(self, route: Route, job: Job) -> None:
        if job in self._ids:
            self._order(Verb.HURRY, route[0], about=self._ids[job])

    def withdraw(self, route: Route, job: Job) -> bool:
        """The ranks are told; whether it was in time, their reports say."""
        if job in self._ids:
            self._order(Verb.WITHDRAW, route[0], about=self._ids[job])
        return False

    def find(self, tier: str, keys: Sequence[BlockKey]) -> FindJob:
        """What all ranks are known to have, and nobody has asked for yet; what is not known yet is
        absent until it is."""
        job, there = FindJob(), self._adoptions[tier].find(keys)
        job.outcomes = [Outcome.THERE if each else Outcome.ABSENT for each in there]
        job.finish()
        return job

    def has_unfound(self, tier: str) -> bool:
        return self._adoptions[tier].num_unfound > 0

    def drop_unfound(self, tier: str) -> None:
        """Nothing of an earlier life is wanted: not what ranks have yet to tell of, either."""
        adoption = self._adoptions[tier]
        if adoption.num_unfound or not adoption.is_complete:
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

    def close(self, timeout_s: float) -> set[str]:
        """The ranks close what they have."""
        return set()

    def _order(
        self,
        verb: Verb,
        tier: str,
        names: Sequence[BlockName] = (),
        slots: tuple[Slot, ...] = (),
        urgent: bool = True,
        about: int = 0,
    ) -> Order:
        self._num_orders += 1
        order = Order(self._num_orders, verb, tier, tuple(names), slots, urgent, about)
        self._orders.append(order)
        return order

    def _ask(
        self,
        tier: str,
        verb: Verb,
        num: int,
        ranks: tuple[int, ...] = (),
        buckets: tuple[int, bytes] | None = None,
    ) -> None:
        """Ask ranks what they have kept."""
        self._num_orders += 1
        order = Order(self._num_orders, verb, tier, ranks=ranks, num=num, buckets=buckets)
        self._orders.append(order)

    # -- what the engine carries -------------------------------------------------------------------

    def take_orders(self) -> list[Order]:
        """What the ranks are to do next, in this order; nothing before all have said hello."""
        if not self._has_heard_all:
            return []
        for tier, adoption in self._adoptions.items():
            if erased := adoption.take_erased():
                names = [BlockName(b"", 0, key) for key in erased]
                self._order(Verb.ERASE, tier, names)
        orders, self._orders = self._orders, []
        return orders

    @property
    def _has_heard_all(self) -> bool:
        """Every rank has said hello."""
        adoptions = self._adoptions.values()
        has_heard = all(each.has_heard_all for each in adoptions)
        return has_heard and len(self._hellos) >= self._num_ranks

    @property
    def is_complete(self) -> bool:
        """Every rank has said what it has."""
        return self._has_heard_all and all(each.is_complete for each in self._adoptions.values())

    @property
    def is_busy(self) -> bool:
        """Orders are to be sent, or to be carried out; what is late is not waited for."""
        is_waited_for = any(line.num_moves > line.num_late for line in self._lines.values())
        is_erasing = any(each.has_to_erase for each in self._adoptions.values())
        return bool(self._orders) or is_waited_for or is_erasing

    @property
    def num_open(self) -> int:
        """Slots in memory that every rank has open."""
        if len(self._hellos) < self._num_ranks:
            return 0
        return min(each.num_open for each in self._hellos.values())

    def hear(self, report: Report) -> None:
        """Reports of some ranks, for each order once from each of them when it has ended."""
        for rank, hello in report.hellos.items():
            self._hellos[rank] = hello
            if hello.found is not None:
                for tier, adoption in self._adoptions.items():
                    adoption.hello(rank, hello.found.get(tier, Found()))
        for piece in report.pieces:
            self._adoptions[piece.tier].hear(piece)
        self._scrubbed += report.scrubbed
        for order_id, done in report.done.items():
            self._note(order_id, done)

    def _note(self, order_id: int, done: Done) -> None:
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
        job.gone, job.num_damaged = all_done.gone, all_done.num_damaged
        job.withdrawn = all_done.withdrawn
        job.num_bytes = all_done.num_bytes
        job.finish(lost=all_done.failed)
        job.seconds = all_done.seconds
