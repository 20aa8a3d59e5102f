"""A rank's disk: carries out what the scheduler's process orders, in the background."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvtier.connectors.vllm.orders import Done, Move, Order
from kvtier.errors import TierError
from kvtier.tiers import LoadResult, MemoryTier
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.wrappers import ThrottledTier
from kvtier.transfer.job import Job
from kvtier.transfer.lane import Lane
from kvtier.types import DISK, BlockKey, BlockName, Slot

logger = logging.getLogger(__name__)

NUM_PROBED = 4
"""Chunks that are read once, only to see how fast the disk is."""
PAGE = 4096


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """An order that was begun. missing: positions of chunks that it was begun without. slots: on
    disk, that its chunks are written to."""

    order: Order
    job: Job
    missing: frozenset[int]
    slots: tuple[Slot, ...] = ()


class RankDisk:
    """Owned by one thread; a thread of its own reads, another one writes.

    host: where chunks come from and go to; its blocks are as large as those of ``tier``.
    bytes_per_s: at most; 0 for as fast as it goes. Which slot of the disk a chunk is in, is known
    here only.
    """

    def __init__(self, tier: DiskTier, host: MemoryTier, bytes_per_s: int = 0) -> None:
        self._tier = tier
        self._blocks = ThrottledTier(tier, bytes_per_s) if bytes_per_s else tier
        self._host = host
        found = tier.unclaimed_keys()
        self._slot_of = dict(zip(found, tier.claim(found), strict=False))
        self.found = tuple(self._slot_of)
        self._reader = Lane("disk load", partial(TierError, DISK, "load"))
        self._writer = Lane("disk store", partial(TierError, DISK, "store"))
        for lane in (self._reader, self._writer):
            lane.start()
        self._under_way: list[_UnderWay] = []
        self._done: dict[int, Done] = {}
        self._probe: Job | None = None
        self._probe_is_told = False
        self._begin_probe()

    def carry_out(self, order: Order) -> None:
        """Begin with an order. Orders of one kind are done one after the other."""
        match order.move:
            case Move.DEMOTE:
                self._demote(order)
            case Move.PROMOTE:
                self._promote(order)
            case Move.FORGET:
                slots = self._take(order.keys)
                self._tier.forget(slots)
                self._tier.free(slots)

    def take_done(self) -> dict[int, Done]:
        """What has ended since the last call, by order id."""
        ended = [each for each in self._under_way if each.job.done]
        self._under_way = [each for each in self._under_way if not each.job.done]
        for each in ended:
            self._end(each)
        done, self._done = self._done, {}
        return done

    def take_probe(self) -> Job | None:
        """How fast the disk reads, once it is known."""
        if self._probe is None or self._probe_is_told or not self._probe.done:
            return None
        self._probe_is_told = True
        return self._probe if self._probe.error is None else None

    def close(self, timeout_s: float) -> bool:
        """Finish what was begun, and free the slab. False where that took too long."""
        is_over = [lane.close(timeout_s) for lane in (self._writer, self._reader)]
        if all(is_over):
            self._tier.close()
        return all(is_over)

    # -- moves -------------------------------------------------------------------------------------

    def _demote(self, order: Order) -> None:
        self._tier.free(self._take(order.evicted))
        num = min(len(order.keys), self._tier.num_free) if self._is_possible(order) else 0
        slots = (self._tier.allocate(num) if self._tier.num_welcome(num) else None) or []
        if not slots:
            self._done[order.order_id] = Done(frozenset(range(len(order.keys))))
            return
        names = [
            BlockName(order.namespace, depth, key)
            for key, depth in zip(order.keys, order.depths, strict=True)
        ]
        work = partial(self._store, names[: len(slots)], slots, order.slots[: len(slots)])
        num_bytes = len(slots) * self._tier.bytes_per_block
        job = self._writer.submit(work, num_bytes)
        missing = frozenset(range(len(slots), len(order.keys)))
        self._under_way.append(_UnderWay(order, job, missing, tuple(slots)))

    def _promote(self, order: Order) -> None:
        there = enumerate(order.keys) if self._is_possible(order) else ()
        at = [at for at, key in there if key in self._slot_of]
        keys = [order.keys[each] for each in at]
        slots = [self._slot_of[key] for key in keys]
        work = partial(self._load, at, keys, slots, [order.slots[each] for each in at])
        num_bytes = len(keys) * self._tier.bytes_per_block
        missing = frozenset(range(len(order.keys))).difference(at)
        self._under_way.append(_UnderWay(order, self._reader.submit(work, num_bytes), missing))

    def _is_possible(self, order: Order) -> bool:
        """Whether there is such memory on this rank. Nothing is moved for an order that names other
        memory; who gave it hears that it failed."""
        count, last = len(order.keys), self._host.num_slots - 1
        if order.move is Move.DEMOTE and len(order.depths) != count:
            reason = f"{len(order.depths)} depths"
        elif len(order.slots) != count:
            reason = f"{len(order.slots)} host slots"
        elif wrong := [slot for slot in order.slots if not 0 <= slot <= last]:
            reason = f"host slot {wrong[0]}, of 0 .. {last},"
        else:
            return True
        logger.error(
            "disk order refused move=%s: %s for %d chunks", order.move.value, reason, count
        )
        return False

    def _store(
        self, names: Sequence[BlockName], slots: Sequence[Slot], host: Sequence[Slot], _: Job
    ) -> Iterable[int]:
        stored = self._blocks.store(names, slots, self._host.addresses(host))
        return [at for at, is_there in enumerate(stored) if not is_there]

    def _load(
        self,
        at: Sequence[int],
        keys: Sequence[BlockKey],
        slots: Sequence[Slot],
        host: Sequence[Slot],
        _: Job,
    ) -> Iterable[int]:
        results = self._blocks.load(keys, slots, self._host.addresses(host))
        return [
            each for each, result in zip(at, results, strict=True) if result is not LoadResult.OK
        ]

    def _end(self, ended: _UnderWay) -> None:
        order, job = ended.order, ended.job
        lost = range(len(order.keys)) if job.error is not None else job.lost
        failed = ended.missing.union(lost)
        if order.move is Move.DEMOTE:
            self._tier.free([slot for at, slot in enumerate(ended.slots) if at in failed])
            for at, (key, slot) in enumerate(zip(order.keys, ended.slots, strict=False)):
                if at not in failed:
                    self._slot_of[key] = slot
            self._begin_probe()
        if job.error is not None:
            logger.warning("disk order failed move=%s error=%s", order.move.value, job.error)
        self._done[order.order_id] = Done(failed, 1, job.num_bytes, job.seconds)

    def _take(self, keys: Sequence[BlockKey]) -> list[Slot]:
        """The slots of chunks that leave."""
        if self._probe is not None:
            self._probe.wait()  # it reads some of them, perhaps; once, and a few
        return [self._slot_of.pop(key) for key in keys if key in self._slot_of]

    # -- how fast it reads -------------------------------------------------------------------------

    def _begin_probe(self) -> None:
        if self._probe is None and self._slot_of:
            keys = list(self._slot_of)[-NUM_PROBED:]
            slots = [self._slot_of[key] for key in keys]
            num_bytes = len(keys) * self._tier.bytes_per_block
            work = partial(self._read_for_nothing, keys, slots)
            self._probe = self._reader.submit(work, num_bytes)

    def _read_for_nothing(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], _: Job
    ) -> Iterable[int]:
        size = self._tier.bytes_per_block
        scratch = np.empty(len(keys) * size + PAGE, np.uint8)
        begin = scratch.ctypes.data + -scratch.ctypes.data % PAGE
        addresses = np.arange(len(keys), dtype=np.uint64) * np.uint64(size) + np.uint64(begin)
        self._blocks.load(keys, slots, addresses)
        return ()
