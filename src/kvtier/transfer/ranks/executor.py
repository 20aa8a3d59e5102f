"""In a rank: carries out, in the background, what the deciding process orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.tiers import MemoryTier
from kvtier.transfer.job import Job
from kvtier.transfer.mover import Move, Mover, Scrubbed
from kvtier.transfer.ranks.messages import Done, Order, Verb
from kvtier.types import BlockKey


@dataclass(frozen=True, slots=True)
class _UnderWay:
    order: Order
    job: Job


class RankExecutor:
    """Owned by one thread. memory: the tier that blocks come from and go to; its slots are what
    orders name. mover: moves them, within this process. found: by storage tier, what a restart
    found there.
    """

    def __init__(
        self,
        memory: MemoryTier,
        mover: Mover,
        found: Mapping[str, tuple[BlockKey, ...]],
    ) -> None:
        self.found = found
        self._memory = memory
        self._mover = mover
        self._under_way: dict[int, _UnderWay] = {}
        self._done: dict[int, Done] = {}

    def carry_out(self, order: Order) -> None:
        """Begin with an order. One for storage that this rank does not have is none of its."""
        if order.tier not in self._mover.storages:
            return
        keys = [name.key for name in order.names]
        match order.verb:
            case Verb.DROP | Verb.ERASE:
                self._mover.drop(order.tier, keys, for_good=order.verb is Verb.ERASE)
            case Verb.HURRY | Verb.WITHDRAW:
                self._turn(order)
            case Verb.READ | Verb.WRITE:
                self._begin(order)

    def _begin(self, order: Order) -> None:
        if not all(0 <= slot < self._memory.num_slots for slot in order.slots):
            self._done[order.order_id] = Done(frozenset(range(len(order.names))))
            return
        ends = (order.tier, self._memory.name)
        if order.verb is Verb.WRITE:
            ends = ends[::-1]
        move = Move(*ends, order.slots, order.slots, order.names)
        self._under_way[order.order_id] = _UnderWay(order, self._mover.begin(move, order.urgent))

    def _turn(self, order: Order) -> None:
        """Change the place in line of a read that has not begun."""
        about = self._under_way.get(order.about)
        if about is None:
            return
        route = (order.tier, self._memory.name)
        if order.verb is Verb.HURRY:
            self._mover.hurry(route, about.job)
        else:
            self._mover.withdraw(route, about.job)

    def take_done(self) -> dict[int, Done]:
        """What has ended since the last call, by order id."""
        for order_id, each in list(self._under_way.items()):
            if each.job.done:
                del self._under_way[order_id]
                self._done[order_id] = _done(each)
        done, self._done = self._done, {}
        return done

    def take_scrubbed(self) -> tuple[Scrubbed, ...]:
        """What idle storage has verified since the last call."""
        return tuple(self._mover.scrub())

    def close(self, timeout_s: float) -> bool:
        """Finish what was begun. False where that took too long: the tiers are in use then."""
        return not self._mover.close(timeout_s)


def _done(ended: _UnderWay) -> Done:
    job, num = ended.job, len(ended.order.names)
    failed = frozenset(range(num)) if job.error is not None else job.lost
    return Done(
        failed, job.gone, job.num_damaged, 1, job.num_bytes, job.seconds, withdrawn=job.withdrawn
    )
