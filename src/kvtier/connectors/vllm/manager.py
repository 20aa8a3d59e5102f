"""The scheduler's side: which chunk is where, what is stored, what leaves."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
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

from kvtier.connectors.vllm.chunks import ChunkIndex, ChunkState

FOUND = {
    ChunkState.ABSENT: LookupResult.MISS,
    ChunkState.WRITING: LookupResult.HIT_PENDING,
    ChunkState.READY: LookupResult.HIT,
}


class HostSlots(BlockIDsLoadStoreSpec):
    """Slots of the host tier, one per chunk, in the order of the keys that were asked for."""


class HostManager(OffloadingManager):
    """Answers vLLM's questions from a ``ChunkIndex``. In the scheduler's process, on its thread."""

    def __init__(self, num_slots: int, publishes_events: bool) -> None:
        self.chunks = ChunkIndex(num_slots)
        self._events: list[OffloadingEvent] | None = [] if publishes_events else None

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return FOUND[self.chunks.state(key)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.chunks.touch(keys)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> HostSlots:
        return HostSlots(self.chunks.hold(keys))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.chunks.release(keys)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        reserved = self.chunks.reserve(keys)
        if reserved is None:
            return None
        self._publish(reserved.evicted, removed=True)
        return PrepareStoreOutput(reserved.keys, HostSlots(reserved.slots), reserved.evicted)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        if success:
            self.chunks.commit(keys)
            self._publish(keys, removed=False)
        else:
            self.chunks.abort(keys)

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, [] if self._events is not None else None
        return events or ()

    def reset_cache(self) -> None:
        self.chunks.clear()

    def _publish(self, keys: Collection[bytes], removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(list(keys), Medium.CPU, removed))
