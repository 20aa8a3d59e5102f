"""The scheduler's side: answers vLLM's questions about blocks, and decides for all ranks."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

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

from kvtier.assembly import build_ladder
from kvtier.connectors.vllm.counts import LOADED, SHARED, Counts
from kvtier.connectors.vllm.hints import hint_of
from kvtier.connectors.vllm.host_slots import HostSlots
from kvtier.connectors.vllm.names import VllmNames
from kvtier.connectors.vllm.promotion import Promotion
from kvtier.connectors.vllm.prompt import GROUP_BYTES, Shape, blocks_after, depth, path_of
from kvtier.connectors.vllm.request_state import RequestState
from kvtier.connectors.vllm.stats import take_stats
from kvtier.index import make_key_index
from kvtier.keyed.cache import BlockLocation, KeyedCache
from kvtier.ladder import LadderOptions
from kvtier.plan import StepClock
from kvtier.tiers import DistantRoom, Quota, Room
from kvtier.transfer.ranks import RankMover, RankOrder, Report
from kvtier.types import DEVICE, DISK, HOST, LoadPolicy

logger = logging.getLogger(__name__)

MISSING = (BlockLocation.NOWHERE, BlockLocation.UNKNOWN)
PIECE_BYTES = 16 << 20
"""Bytes that a rank reads from its disk, or writes to it, at a time."""
FOUND = {
    BlockLocation.NOWHERE: LookupResult.MISS,
    BlockLocation.ARRIVING: LookupResult.HIT_PENDING,
    BlockLocation.MEMORY: LookupResult.HIT,
    BlockLocation.STORAGE: LookupResult.RETRY,
    BlockLocation.UNKNOWN: LookupResult.RETRY,
}
KINDS = {HOST: (Medium.CPU, Locality.LOCAL), DISK: (Medium.STORAGE, Locality.LOCAL)}
SOURCES = {HOST: CacheHitSource.HOST, DISK: CacheHitSource.DISK}


class TierManager(OffloadingManager):
    """Translates: what vLLM asks to what ``KeyedCache`` answers.

    In the scheduler's process, on its thread.

    room: blocks, per tier; of each rank. bytes_per_day: of a rank's disk. lookup_deadline_s: how
    long a request waits to hear what a store has. eviction_policy: see ``Settings``. follows_hints:
    those of clients count.
    """

    def __init__(
        self,
        mover: RankMover,
        room: Mapping[str, int],
        names: VllmNames,
        shape: Shape,
        policy: LoadPolicy,
        bytes_per_day: int,
        publishes_events: bool,
        lookup_deadline_s: float = 0.0,
        eviction_policy: str = "runs",
        follows_hints: bool = True,
    ) -> None:
        self._follows_hints = follows_hints
        self.names = names
        self.counts = Counts()
        self._mover = mover
        self._host = DistantRoom(room[HOST])
        rooms: dict[str, Room] = {HOST: self._host}
        rooms |= {name: Quota(partial(self._limit, name, room[name])) for name in mover.storages}
        learning = rooms if shape.is_cut_alike else ()
        group_bytes = 0 if shape.has_one_group else GROUP_BYTES
        index = make_key_index(
            tuple(rooms), lambda: names.digest, learning, eviction_policy, group_bytes
        )
        self.ladder = build_ladder(
            index,
            rooms,
            mover,
            LadderOptions(
                shape.bytes_per_block,
                bytes_per_day={DISK: bytes_per_day},
                piece_blocks=max(1, PIECE_BYTES // max(1, shape.bytes_per_block)),
                lookup_patience_s=lookup_deadline_s,
                block_size=shape.block_sizes[0] if index.learning else 0,
                num_shards=shape.num_shards,
            ),
            clock=time.monotonic,
            device=DEVICE,
        )
        self.ladder.metrics.keep_observations(SHARED)

        def knows_storage() -> bool:
            return mover.is_complete

        self.cache = KeyedCache(
            index,
            self.ladder,
            lambda: names.digest,
            time.monotonic,
            knows_storage,
        )
        self.bringing = Promotion(self.cache, self._host, shape, policy, knows_storage, self.counts)
        self.steps = StepClock(self.ladder.account.observe_prefill)
        self._shape = shape
        self._publishes_events = publishes_events
        self._visits: dict[str, RequestState] = {}
        self._events: list[OffloadingEvent] = []
        self._keeps = False

    def _limit(self, tier: str, own: int) -> int:
        """Return how many blocks every rank has room for. own: by the slots of the first rank."""
        told = self._mover.num_blocks(tier)
        return own if told is None else min(own, told)

    @property
    def has_storage(self) -> bool:
        return bool(self.ladder.storages)

    # -- what vLLM asks ----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        visit = RequestState(req_context)
        self._visits[req_context.req_id] = visit
        req_context.set_state(visit)  # its stores may end after it has finished
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        visit = self._visits.pop(req_context.req_id, None)
        if visit is not None:  # vLLM tells of no use but this
            self._begin(visit)  # where it had all of it itself, nothing was asked for
            self._note_declined(visit)
            self.cache.touch(visit.in_prompt_order())
            if visit.last_asked:
                self._hint(visit.context, at_end=True)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        visit = self._visits[req_context.req_id]
        end = req_context.get_offload_key_position(key)
        if visit.limit is not None and end is not None and end > visit.limit:
            return LookupResult.MISS
        if not visit.is_kept(key):
            return LookupResult.MISS
        place = self._find(key, visit)
        if not self._is_allowed(key, place, req_context):
            return LookupResult.MISS
        if visit.is_impatient and place is not BlockLocation.MEMORY:
            return LookupResult.MISS
        visit.places[key] = place
        if place is BlockLocation.STORAGE and self.bringing.goes_direct(key, visit):
            return LookupResult.HIT
        return FOUND[place]

    def _find(self, key: OffloadKey, visit: RequestState) -> BlockLocation:
        """Return the location of a block.

        All blocks of a request are looked up when vLLM asks for the first. A block that was missing
        is looked up again if storage may have recovered it by then.
        """
        if visit.found is None:
            self._begin(visit)
            keys = blocks_after(visit.context, visit.num_computed)
            shared = [each for each in keys if visit.is_shared(each)]
            has_gaps = not self._shape.has_one_group
            visit.found = {}
            if shared:
                places, visit.asked = self.cache.begin_lookup(shared, has_gaps)
                visit.found.update(zip(shared, places, strict=True))
            if len(shared) < len(keys):
                own = [each for each in keys if not visit.is_shared(each)]
                visit.found.update(zip(own, self.cache.locate_in_memory(own), strict=True))
        place = visit.found.get(key)
        if not visit.is_shared(key):
            return self.cache.locate_in_memory([key])[0] if place is None else place
        if place is None or (
            place is BlockLocation.NOWHERE and self.ladder.storage_lookup.has_unfound_at_once
        ):
            place = self.cache.locate(key)
            if place in MISSING and self.cache.adopt_recovered([key]):
                place = self.cache.locate(key)
        return place

    def _is_allowed(self, key: OffloadKey, place: BlockLocation, context: ReqContext) -> bool:
        """Whether a request may load from there; its ``kv_load_tiers`` say."""
        (tier,) = self.bringing.sources({key: place})
        return bool(context.load_tier_filter.allows(*kind_of(tier)))

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        visit = self._visits.get(req_context.req_id)
        if visit is not None and key in visit.read:
            return source_of(DISK)
        (origin,) = self.cache.origins([key])
        return source_of(origin)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.cache.touch(keys)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> HostSlots:
        visit = self._visits.get(req_context.req_id)
        read = {} if visit is None else visit.begin_load(keys)
        held = [key for key in keys if key not in read]
        sources = self.cache.direct_reads.read(list(read), list(read.values()))
        for tier, num in Counter([*self.cache.origins(held), *sources]).items():
            self.counts.add(LOADED, num, tier)
        self._note_load(keys, req_context)
        self._use(keys, req_context)
        direct = [at for at, key in enumerate(keys) if key in read] if read else []
        return HostSlots(self.cache.hold(held), direct, self._mover.take_reads())

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        visit = req_context.get_state(RequestState)
        self.cache.release([key for key in keys if visit is None or key not in visit.read])
        self.bringing.load_ended()
        if visit is not None and visit.loading is not None:
            first, end, since_s = visit.loading
            waited_s = visit.waited_s + time.monotonic() - since_s
            self.ladder.account.saved(first, end, waited_s)
            visit.loading, visit.waited_s = None, 0.0

    def _note_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """vLLM begins to copy blocks to the device, as it was decided."""
        visit = self._visits.get(req_context.req_id)
        if visit is not None:
            self.ladder.account.planned(len(keys), 0)
            self._note_declined(visit)
            end = max((req_context.get_offload_key_position(key) or 0 for key in keys), default=0)
            visit.loading = (visit.num_computed, end, time.monotonic())

    def _note_declined(self, visit: RequestState) -> None:
        """A request is asked about again and again; what was decided last is what counts."""
        self.ladder.account.planned(0, visit.declined_ahead + visit.declined)
        visit.declined_ahead = visit.declined = 0

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        visit = req_context.get_state(RequestState)
        if visit is not None:
            keys = [key for key in keys if visit.is_kept(key)]
        if self.cache.learns:
            self._tell(list(keys), req_context)
        room = self.cache.reserve(keys)
        if room is None:
            return None
        self._use(keys, req_context)
        return PrepareStoreOutput(room.keys, HostSlots(room.slots), room.evicted)

    def _begin(self, visit: RequestState) -> None:
        """The first time that its blocks matter: tell the policy of the request."""
        if self.cache.learns and visit.last_asked is None:
            keys = [key for key in self._path(visit.context) if visit.is_kept(key)]
            self.cache.on_request(keys)
            visit.last_asked = keys[-1] if keys else b""
            self._hint(visit.context, at_end=False)

    def _hint(self, context: ReqContext, at_end: bool) -> None:
        hint = hint_of(context) if self._follows_hints else None
        if hint is not None:
            said = hint.at_end if at_end else hint.at_begin
            self.cache.hint(self._path(context), said, self._shape.block_sizes[0])

    def _path(self, context: ReqContext) -> list[OffloadKey]:
        return path_of(context, self._shape.block_sizes[0])

    def _tell(self, keys: list[OffloadKey], context: ReqContext) -> None:
        """Blocks are about to be stored: those of an answer come behind its prompt."""
        visit = context.get_state(RequestState)
        if visit is None:
            return
        self._begin(visit)
        last = visit.last_asked
        if not last:
            return
        end_asked = context.get_offload_key_position(OffloadKey(last)) or 0
        ends = {key: context.get_offload_key_position(key) or 0 for key in keys}
        new = sorted((key for key in keys if ends[key] > end_asked), key=ends.__getitem__)
        if new:
            self.cache.continues(new, last)
            visit.last_asked = new[-1]

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        if not success:
            self.cache.abort(keys)
            return
        ends = {key: req_context.get_offload_key_position(key) or 0 for key in keys}
        in_order = sorted(ends, key=ends.__getitem__)
        visit = req_context.get_state(RequestState)
        shared = [key for key in in_order if visit is None or visit.is_shared(key)]
        own = [key for key in in_order if visit is not None and not visit.is_shared(key)]
        for blocks in filter(None, (shared, own)):
            depths = [self._depth(ends[key]) for key in blocks]
            self.cache.commit(blocks, depths, to_storage=blocks is shared)

    def _depth(self, end: int) -> int:
        """Place of the block that ends at a token, in its prompt."""
        return depth(end, min(self._shape.block_sizes))

    def _use(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        visit = self._visits.get(req_context.req_id)
        if visit is not None:
            visit.used.update(dict.fromkeys(keys))

    def take_events(self) -> Iterable[OffloadingEvent]:
        self._note_changes()
        events, self._events = self._events, []
        return events

    def _note_changes(self) -> None:
        """Collect the changes of the cache for events.

        Called often enough that nothing piles up if nobody wants events.
        """
        for each in self.cache.take_changes():
            if self._publishes_events:
                medium, locality = kind_of(each.tier)
                event = OffloadingEvent(each.keys, medium, each.is_removed, locality)
                self._events.append(event)

    def has_pending_work(self) -> bool:
        return self.ladder.is_busy or self._mover.is_busy or not self._mover.is_complete

    @contextmanager
    def keeping(self, keeps: bool) -> Iterator[None]:
        """If ``keeps``, a reset meanwhile leaves what is in the tiers.

        The weights are the same.
        """
        self._keeps = keeps
        try:
            yield
        finally:
            self._keeps = False

    def reset_cache(self) -> None:
        if self._keeps:
            logger.info("the engine pauses with its weights: KV outside the device is kept")
            self.cache.end_copies()
        else:
            logger.warning("reset: KV in host memory, on disk and in stores is forgotten")
            self.cache.clear()
            if self.has_storage:
                self.names.disown()
        for visit in self._visits.values():
            visit.limit = visit.wait = None
            visit.promoted.clear()
            visit.direct.clear()
            visit.read.clear()
            visit.used.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        self._note_changes()
        used, room = self.ladder.used_slots(), self.ladder.open_slots()
        return take_stats(self.counts, self.ladder.metrics, used, room)

    def shutdown(self) -> None:
        if self.has_storage:
            self.names.close()

    # -- what the connector tells ------------------------------------------------------------------

    def visit(self, request_id: str) -> RequestState:
        """Return the state of a request that has begun and not finished."""
        return self._visits[request_id]

    def take_orders(self) -> list[RankOrder]:
        """Return the next orders to the ranks."""
        return self._mover.take_orders()

    def observe_loads(self, sizes: Sequence[float], seconds: float) -> None:
        """Copies to the device, of so many bytes each, took so long together."""
        total = sum(sizes)
        for size in sizes if total else ():
            self.ladder.account.observe_copy((HOST, DEVICE), int(size), seconds * size / total)

    def hear(self, report: Report) -> None:
        """Take in reports of the ranks, before vLLM hears which of its jobs are done."""
        self._mover.hear(report)
        self._host.open(self._mover.num_open)
        self.cache.distrust(report.failed)
        self.cache.poll()
        now_s = time.monotonic()
        for step in report.steps:
            self.steps.end(step, now_s)
        self._note_changes()


def kind_of(tier: str) -> tuple[Medium, Locality]:
    """Medium and place. Whatever is not ours alone is a store, which is elsewhere."""
    return KINDS.get(tier, (Medium.STORAGE, Locality.REMOTE))


def source_of(tier: str) -> CacheHitSource:
    """Under which name hits are counted. vLLM has none for stores."""
    return SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
