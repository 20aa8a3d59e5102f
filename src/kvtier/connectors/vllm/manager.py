"""The scheduler's side: answers vLLM's questions about blocks, and decides for all ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.connectors.vllm.counts import IMPATIENT, LOADED, RECOMPUTED, ROOM, USED, Counts
from kvtier.connectors.vllm.host_slots import HostSlots
from kvtier.connectors.vllm.names import Names
from kvtier.connectors.vllm.prompt import blocks_after, depth
from kvtier.connectors.vllm.visit import Advice, Visit, Wait
from kvtier.connectors.vllm.words import FOUND, kind_of, source_of
from kvtier.index import make_key_index
from kvtier.keyed_cache import KeyedCache, Place
from kvtier.ladder import Ladder, LadderOptions
from kvtier.plan import Costs, StepClock, end_worth_loading, patience_s
from kvtier.tiers import DistantRoom, Quota, Room
from kvtier.transfer.ranks import Order, RankMover, Report
from kvtier.types import DEVICE, DISK, HOST, LoadPolicy

PIECE_BYTES = 16 << 20
"""Of a rank, what is read from its disk, or written to it, at a time."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How prompts are cut. block_sizes: tokens in a block, of each KV group. bytes_per_block: of
    the largest one, on one rank."""

    block_sizes: tuple[int, ...]
    bytes_per_block: int

    @property
    def has_one_group(self) -> bool:
        return len(self.block_sizes) == 1


class TierManager(OffloadingManager):
    """Translates: what vLLM asks to what ``KeyedCache`` answers. In the scheduler's process, on its
    thread.

    room: blocks, per tier; of each rank. bytes_per_day: of a rank's disk. lookup_deadline_s: how
    long a request waits to hear what a store has.
    """

    def __init__(
        self,
        mover: RankMover,
        room: Mapping[str, int],
        names: Names,
        shape: Shape,
        policy: LoadPolicy,
        bytes_per_day: int,
        publishes_events: bool,
        lookup_deadline_s: float = 0.0,
    ) -> None:
        self.names = names
        self.counts = Counts()
        self._mover = mover
        self._host = DistantRoom(room[HOST])
        rooms: dict[str, Room] = {HOST: self._host}
        rooms |= {name: Quota(partial(room.__getitem__, name)) for name in mover.storages}
        index = make_key_index(tuple(rooms), lambda: names.digest)
        self.ladder = Ladder(
            index,
            rooms,
            mover,
            options=LadderOptions(
                shape.bytes_per_block,
                bytes_per_day={DISK: bytes_per_day},
                piece_blocks=max(1, PIECE_BYTES // max(1, shape.bytes_per_block)),
                lookup_patience_s=lookup_deadline_s,
            ),
            clock=time.monotonic,
            device=DEVICE,
        )
        self.cache = KeyedCache(
            index,
            self.ladder,
            lambda: names.digest,
            time.monotonic,
            knows_storage=lambda: mover.is_complete,
        )
        self.steps = StepClock(self.ladder.costs.observe_prefill)
        self._always_loads = policy is LoadPolicy.ALWAYS
        self._shape = shape
        self._publishes_events = publishes_events
        self._visits: dict[str, Visit] = {}
        self._num_ended_loads = 0
        self._events: list[OffloadingEvent] = []

    @property
    def has_storage(self) -> bool:
        return bool(self.ladder.storages)

    # -- what vLLM asks ----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        visit = Visit(req_context)
        self._visits[req_context.req_id] = visit
        req_context.set_state(visit)  # its stores may end after it has finished
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        visit = self._visits.pop(req_context.req_id, None)
        if visit is not None:  # vLLM tells of no use but this
            self.cache.touch(visit.in_prompt_order())

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        visit = self._visits[req_context.req_id]
        end = req_context.get_offload_key_position(key)
        if visit.limit is not None and end is not None and end > visit.limit:
            return LookupResult.MISS
        place = self._find(key, visit)
        if not self._is_allowed(key, place, req_context):
            return LookupResult.MISS
        if visit.is_off_disk and place in (Place.STORAGE, Place.UNKNOWN):
            return LookupResult.MISS
        if visit.is_impatient and place is not Place.MEMORY:
            return LookupResult.MISS
        visit.places[key] = place
        return FOUND[place]

    def _find(self, key: OffloadKey, visit: Visit) -> Place:
        """Where a block is: all of the request's are looked up at once, when the first is asked
        for. Where storage may have more than turned up then, it is asked again."""
        if visit.found is None:
            keys = blocks_after(visit.context, visit.num_computed)
            if visit.is_off_disk:
                places = self.cache.find_all(keys)
            else:
                has_gaps = not self._shape.has_one_group
                places, visit.asked = self.cache.find_or_ask(keys, has_gaps)
            visit.found = dict(zip(keys, places, strict=True))
        place = visit.found.get(key)
        if place is None or (place is Place.NOWHERE and self.ladder.has_unfound_at_once):
            place = self.cache.find(key)
        return place

    def _is_allowed(self, key: OffloadKey, place: Place, context: ReqContext) -> bool:
        """Whether a request may load from there; its ``kv_load_tiers`` say."""
        (tier,) = self._tiers({key: place})
        return bool(context.load_tier_filter.allows(*kind_of(tier)))

    def _tiers(self, places: Mapping[OffloadKey, Place]) -> list[str]:
        """Where each would be read from: host memory, too, where it is on its way there."""
        if Place.STORAGE not in places.values():
            return [HOST] * len(places)
        if len(self.ladder.storages) > 1:
            return self.cache.sources(list(places))
        (storage,) = self.ladder.storages
        return [storage if place is Place.STORAGE else HOST for place in places.values()]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        (origin,) = self.cache.origins([key])
        return source_of(origin)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.cache.touch(keys)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> HostSlots:
        for tier, num in Counter(self.cache.origins(list(keys))).items():
            self.counts.add(LOADED, num, tier)
        self._use(keys, req_context)
        return HostSlots(self.cache.hold(list(keys)))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.cache.release(keys)
        self._num_ended_loads += 1

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        room = self.cache.reserve(keys)
        if room is None:
            return None
        self._use(keys, req_context)
        return PrepareStoreOutput(room.keys, HostSlots(room.slots), room.evicted)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        if not success:
            self.cache.abort(keys)
            return
        ends = {key: req_context.get_offload_key_position(key) or 0 for key in keys}
        in_order = sorted(ends, key=ends.__getitem__)
        visit = req_context.get_state(Visit)
        depths = [self._depth(ends[key]) for key in in_order]
        self.cache.commit(in_order, depths, to_storage=not (visit and visit.is_off_disk))

    def _use(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        visit = self._visits.get(req_context.req_id)
        if visit is not None:
            visit.used.update(dict.fromkeys(keys))

    def take_events(self) -> Iterable[OffloadingEvent]:
        self._note_changes()
        events, self._events = self._events, []
        return events

    def _note_changes(self) -> None:
        """Called often enough that nothing piles up where nobody wants events."""
        for each in self.cache.take_changes():
            if self._publishes_events:
                medium, locality = kind_of(each.tier)
                event = OffloadingEvent(each.keys, medium, each.is_removed, locality)
                self._events.append(event)

    def has_pending_work(self) -> bool:
        return self.ladder.is_busy or self._mover.is_busy or not self._mover.is_complete

    def reset_cache(self) -> None:
        self.cache.clear()
        if self.has_storage:
            self.names.disown()
        for visit in self._visits.values():
            visit.limit = visit.wait = None
            visit.promoted.clear()
            visit.used.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        self._note_changes()
        self.counts.add_all(self.ladder.metrics.take_recent())
        numbers = self.counts.take()
        if not numbers:
            return None
        stats = OffloadingConnectorStats()
        for (metric, labels), number in numbers.items():
            stats.increase_counter(metric.name, number, labels)
        for gauge, slots in (USED, self.ladder.used_slots()), (ROOM, self.ladder.open_slots()):
            for tier, num in slots.items():
                stats.set_gauge(gauge.name, num, (tier,))
        return stats

    def shutdown(self) -> None:
        if self.has_storage:
            self.names.close()

    # -- to wait or not ----------------------------------------------------------------------------

    def must_wait(self, request_id: str, first: int) -> bool:
        """Whether a request has to wait, and nothing has happened since that could change that: it
        need not look its blocks up again. first: tokens that it has already."""
        visit = self._visits[request_id]
        wait = visit.wait
        if wait is None:
            return False
        if (
            wait.first == first
            and time.monotonic() < wait.until
            and wait.num_ended_loads in (None, self._num_ended_loads)
            and not any(sign.is_over for sign in wait.signs)
            and (wait.unknown is None or self.cache.find(wait.unknown) is Place.UNKNOWN)
        ):
            return True
        visit.wait = None
        return False

    def begin_look_up(self, request_id: str, first: int) -> None:
        """A request is about to ask for its blocks, those after the ``first`` tokens."""
        visit = self._visits[request_id]
        visit.places.clear()
        visit.found, visit.num_computed = None, first

    def advise(self, request_id: str, first: int, num_tokens: int) -> Advice:
        """Some blocks that a request asked for are not in host memory: bring them there, and have
        it wait, but for no longer than computing them would take.

        first: tokens that it has already. num_tokens: of its prompt.
        """
        visit = self._visits[request_id]
        if visit.is_impatient:
            return Advice.COMPUTE
        now_s = time.monotonic()
        visit.waits_since = visit.waits_since or now_s
        ends = {key: visit.context.get_offload_key_position(key) or 0 for key in visit.places}
        found = max(ends.values(), default=num_tokens)
        until_s = visit.waits_since + patience_s(self._costs(), first, found)
        if now_s >= until_s:
            self.counts.add(IMPATIENT, 1)
            visit.is_impatient = True
            return Advice.LOOK_AGAIN
        on_disk = [key for key, place in visit.places.items() if place is Place.STORAGE]
        if not on_disk:
            self._wait(visit, first, until_s)
            return Advice.WAIT
        if not visit.promoted.isdisjoint(on_disk):  # a read failed: it may do so again and again
            visit.is_impatient = True
            return Advice.LOOK_AGAIN
        limit = self._limit(visit, ends, first, num_tokens)
        wanted = [key for key in on_disk if ends[key] <= limit]
        num = self.cache.promote(wanted)
        visit.promoted.update(wanted[:num])
        if num < len(wanted):
            limit = ends[wanted[num]] - 1 if self._shape.has_one_group else first
        if limit < found:
            visit.limit = limit
            self.counts.add(RECOMPUTED, sum(end > limit for end in ends.values()))
            return Advice.LOOK_AGAIN
        self._wait(visit, first, until_s)
        return Advice.WAIT

    def _wait(self, visit: Visit, first: int, until_s: float) -> None:
        """Note what has to happen before another look is worth it. Where nothing is on its way to
        memory, vLLM waits for a load of its own."""
        unknown = next((key for key, at in visit.places.items() if at is Place.UNKNOWN), None)
        coming = [key for key, at in visit.places.items() if at in (Place.ARRIVING, Place.STORAGE)]
        if coming or unknown is not None:
            watches = [self.cache.watch(coming)] if coming else []
            if self._mover.is_complete:  # then stores were asked for it
                unknown = None
            visit.wait = Wait(first, until_s, [*watches, *visit.asked], unknown)
        elif visit.places:
            visit.wait = Wait(first, until_s, num_ended_loads=self._num_ended_loads)

    def num_worth_loading(self, request_id: str, first: int, found: int, num_tokens: int) -> int:
        """Of ``found`` tokens after the ``first`` ones, all in host memory: how many to load."""
        visit = self._visits[request_id]
        visit.waits_since = None
        ends = {key: visit.context.get_offload_key_position(key) or 0 for key in visit.places}
        limit = self._limit(visit, ends, first, num_tokens)
        if limit >= max(ends.values(), default=0):
            return found
        worth = min(found, max(0, limit - first))
        self.counts.add(RECOMPUTED, sum(end > first + worth for end in ends.values()))
        return worth

    def _limit(self, visit: Visit, ends: dict[OffloadKey, int], first: int, num_tokens: int) -> int:
        """The token up to which loading beats computing."""
        found = max(ends.values(), default=first)
        if self._always_loads:
            return found
        return end_worth_loading(
            self._costs(),
            self._tiers(visit.places),
            first=first,
            found=found,
            num_tokens=num_tokens,
            block_size=self._shape.block_sizes[0] if self._shape.has_one_group else 0,
            bytes_per_block=self._shape.bytes_per_block,
            num_staging_slots=self._host.num_open,
        )

    def _costs(self) -> Costs:
        return self.ladder.cost_snapshot()

    def _depth(self, end: int) -> int:
        """Place of the block that ends at a token, in its prompt."""
        return depth(end, min(self._shape.block_sizes))

    # -- what the connector tells ------------------------------------------------------------------

    def keep_off_disk(self, request_id: str) -> None:
        """A request's blocks are named by what another process may call something else: an adapter,
        by its name alone."""
        self._visits[request_id].is_off_disk = True

    def take_orders(self) -> list[Order]:
        """What the ranks are to do next."""
        return self._mover.take_orders()

    def observe_loads(self, sizes: Sequence[float], seconds: float) -> None:
        """Copies to the device, of so many bytes each, took so long together."""
        total = sum(sizes)
        for size in sizes if total else ():
            self.ladder.costs.observe_copy((HOST, DEVICE), int(size), seconds * size / total)

    def hear(self, report: Report) -> None:
        """What the ranks say, before vLLM hears which of its jobs are done."""
        self._mover.hear(report)
        self._host.open(self._mover.num_open)
        self.cache.distrust(report.failed)
        self.cache.poll()
        now_s = time.monotonic()
        for step in report.steps:
            self.steps.end(step, now_s)
        self._note_changes()
