"""The scheduler's side: answers vLLM's questions about chunks, and decides for all ranks."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.connectors.vllm.counts import (
    EVICTED,
    FAILED,
    IMPATIENT,
    LOADED,
    MOVED_BYTES,
    MOVED_SECONDS,
    NOT_DEMOTED,
    RECOMPUTED,
    ROOM,
    ROUTES,
    USED,
    Counts,
)
from kvtier.connectors.vllm.host_slots import HostSlots
from kvtier.connectors.vllm.judge import TO_HOST, Judge
from kvtier.connectors.vllm.names import Names
from kvtier.connectors.vllm.orders import Done, Move, Order, Report
from kvtier.connectors.vllm.placement import Place, Placement
from kvtier.connectors.vllm.prompt import chunks_of
from kvtier.types import DEVICE, DISK, HOST

FOUND = {
    Place.NOWHERE: LookupResult.MISS,
    Place.ARRIVING: LookupResult.HIT_PENDING,
    Place.HOST: LookupResult.HIT,
    Place.DISK: LookupResult.RETRY,
    Place.UNKNOWN: LookupResult.RETRY,
}
MEDIUM = {HOST: Medium.CPU, DISK: Medium.STORAGE}
SOURCE = {HOST: CacheHitSource.HOST, DISK: CacheHitSource.DISK}


@dataclass(slots=True)
class Visit:
    """What is known of one request.

    places: of the chunks that its last look-up met, in that look-up's order. limit: no chunk that
    ends beyond this token is loaded. waits_since: when it began to wait. is_impatient: it takes
    what is ready, and waits for nothing more. is_off_disk: its chunks stay in memory. used: those
    that were loaded or stored for it.
    """

    context: ReqContext
    places: dict[OffloadKey, Place] = field(default_factory=dict)
    limit: int | None = None
    waits_since: float | None = None
    is_impatient: bool = False
    is_off_disk: bool = False
    used: dict[OffloadKey, None] = field(default_factory=dict)

    def in_prompt_order(self) -> list[OffloadKey]:
        """All chunks of the request, those as well that the device had itself."""
        chunks = chunks_of(self.context)
        return chunks if self.used.keys() <= set(chunks) else list(self.used)


@dataclass(frozen=True, slots=True)
class Shape:
    """How vLLM cuts prompts. tokens_per_chunk: of each KV group. chunk_bytes: of the largest one,
    on one rank."""

    tokens_per_chunk: tuple[int, ...]
    chunk_bytes: int

    @property
    def has_one_group(self) -> bool:
        return len(self.tokens_per_chunk) == 1


class Advice(Enum):
    """To a request whose look-up ended without an answer."""

    WAIT = "wait"
    LOOK_AGAIN = "look again"
    COMPUTE = "compute"


class TierManager(OffloadingManager):
    """Thin: what is where is in ``placement``, what is worth it in ``judge``. In the scheduler's
    process, on its thread."""

    def __init__(
        self,
        placement: Placement,
        judge: Judge,
        names: Names,
        shape: Shape,
        publishes_events: bool,
    ) -> None:
        self.placement = placement
        self.judge = judge
        self.names = names
        self.counts = Counts()
        self._shape = shape
        self._publishes_events = publishes_events
        self._visits: dict[str, Visit] = {}
        self._events: list[OffloadingEvent] = []

    # -- what vLLM asks ----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        visit = Visit(req_context)
        self._visits[req_context.req_id] = visit
        req_context.set_state(visit)  # its stores may end after it has finished
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        visit = self._visits.pop(req_context.req_id, None)
        if visit is not None:  # vLLM tells of no use but this
            self.placement.touch(visit.in_prompt_order())

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        visit = self._visits[req_context.req_id]
        end = req_context.get_offload_key_position(key)
        if visit.limit is not None and end is not None and end > visit.limit:
            return LookupResult.MISS
        place = self.placement.find(key)
        if not _is_allowed(place, req_context):
            return LookupResult.MISS
        if visit.is_off_disk and place in (Place.DISK, Place.UNKNOWN):
            return LookupResult.MISS
        if visit.is_impatient and place is not Place.HOST:
            return LookupResult.MISS
        visit.places[key] = place
        return FOUND[place]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return SOURCE[self.placement.origin(key)]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.placement.touch(keys)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> HostSlots:
        for tier in (HOST, DISK):
            num = sum(self.placement.origin(key) == tier for key in keys)
            self.counts.add(LOADED, num, tier)
        self._use(keys, req_context)
        return HostSlots(self.placement.hold(keys))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.placement.release(keys)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        room = self.placement.reserve(keys)
        if room is None:
            return None
        self._use(keys, req_context)
        slots = HostSlots(self.placement.host.slots(room.keys))
        return PrepareStoreOutput(room.keys, slots, room.evicted)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        if not success:
            self.placement.abort(keys)
            return
        ends = {key: req_context.get_offload_key_position(key) or 0 for key in keys}
        in_order = sorted(ends, key=ends.__getitem__)
        visit = req_context.get_state(Visit)
        depths = [self._depth(ends[key]) for key in in_order]
        self.placement.commit(in_order, depths, to_disk=not (visit and visit.is_off_disk))

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
        for each in self.placement.take_changes():
            if each.is_removed:
                self.counts.add(EVICTED, len(each.keys), each.tier)
            if self._publishes_events:
                medium = MEDIUM[each.tier]
                event = OffloadingEvent(each.keys, medium, each.is_removed, Locality.LOCAL)
                self._events.append(event)

    def has_pending_work(self) -> bool:
        return self.placement.is_moving or not self.placement.is_complete

    def reset_cache(self) -> None:
        self.placement.clear()
        if self.placement.has_disk:
            self.names.disown()
            self.attend()
        for visit in self._visits.values():
            visit.limit = None
            visit.used.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        tiers = {HOST: self.placement.host, DISK: self.placement.disk}
        self._note_changes()
        self.counts.add(NOT_DEMOTED, self.placement.take_num_not_demoted())
        numbers = self.counts.take()
        if not numbers:
            return None
        stats = OffloadingConnectorStats()
        for (metric, labels), number in numbers.items():
            stats.increase_counter(metric.name, number, labels)
        for tier, index in tiers.items():
            stats.set_gauge(USED.name, len(index), (tier,))
            stats.set_gauge(ROOM.name, index.capacity, (tier,))
        return stats

    def shutdown(self) -> None:
        if self.placement.has_disk:
            self.names.close()

    # -- to wait or not ----------------------------------------------------------------------------

    def begin_look_up(self, request_id: str) -> None:
        """A request is about to ask for its chunks, from the first one on."""
        self.attend()
        self._visits[request_id].places.clear()

    def advise(self, request_id: str, first: int, num_tokens: int) -> Advice:
        """Some chunks that a request asked for are not in host memory: bring them there, and have
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
        if now_s - visit.waits_since >= self.judge.patience_s(first, found):
            self.counts.add(IMPATIENT, 1)
            visit.is_impatient = True
            return Advice.LOOK_AGAIN
        on_disk = [key for key, place in visit.places.items() if place is Place.DISK]
        if not on_disk:
            return Advice.WAIT
        limit = self._limit(visit, ends, first, num_tokens)
        wanted = [key for key in on_disk if ends[key] <= limit]
        num = self.placement.promote(wanted, [self._depth(ends[key]) for key in wanted])
        if num < len(wanted):
            limit = ends[wanted[num]] - 1 if self._shape.has_one_group else first
        if limit < found:
            visit.limit = limit
            self.counts.add(RECOMPUTED, sum(end > limit for end in ends.values()))
            return Advice.LOOK_AGAIN
        return Advice.WAIT

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
        queued = self.placement.num_promoting * self._shape.chunk_bytes
        tiers = [DISK if place is Place.DISK else HOST for place in visit.places.values()]
        found = max(ends.values(), default=first)
        if self._shape.has_one_group:
            (step,) = self._shape.tokens_per_chunk
            num_before = first // step
            num = self.judge.num_worth_loading(
                [DEVICE] * num_before + tiers, num_tokens, self.placement.host.capacity, queued
            )
            return num * step
        chunks = {tier: tiers.count(tier) for tier in (HOST, DISK) if tier in tiers}
        return found if self.judge.is_worth_loading(chunks, first, found, queued) else first

    def _depth(self, end: int) -> int:
        """Place of the chunk that ends at a token, in its prompt."""
        return max(0, end // min(self._shape.tokens_per_chunk) - 1)

    # -- what the connector tells ------------------------------------------------------------------

    def attend(self) -> None:
        """See whether it is known by now what chunks are called."""
        if self.placement.has_disk:
            self.placement.namespace = self.names.digest or None

    def keep_off_disk(self, request_id: str) -> None:
        """A request's chunks are named by what another process may call something else: an adapter,
        by its name alone."""
        self._visits[request_id].is_off_disk = True

    def hear(self, report: Report) -> None:
        """What the ranks say, before vLLM hears which of its jobs are done."""
        for rank, hello in report.hellos.items():
            self.placement.meet(rank, hello)
            self.judge.costs.observe_copy(TO_HOST, hello.probe_bytes, hello.probe_s)
        self.placement.distrust(report.failed)
        for order_id, done in report.done.items():
            ended = self.placement.finish(order_id, done)
            if ended is not None:
                self._count(*ended)
        now_s = time.monotonic()
        for step in report.steps:
            self.judge.end_step(step, now_s)
        self._note_changes()

    def _count(self, order: Order, done: Done) -> None:
        route = ROUTES[order.move.value]
        num_failed = len(done.failed)
        self.counts.add(FAILED, num_failed, *route)
        self.counts.add(MOVED_BYTES, done.num_bytes, *route)
        self.counts.add(MOVED_SECONDS, done.seconds, *route)
        if order.move is Move.PROMOTE and not num_failed:
            self.judge.costs.observe_copy(TO_HOST, done.num_bytes, done.seconds)


def _is_allowed(place: Place, context: ReqContext) -> bool:
    """Whether a request may load from there; its ``kv_load_tiers`` say."""
    medium = Medium.STORAGE if place is Place.DISK else Medium.CPU
    return bool(context.load_tier_filter.allows(medium, Locality.LOCAL))
