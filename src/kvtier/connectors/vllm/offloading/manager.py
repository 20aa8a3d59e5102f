"""vLLM's offloading manager over kvtier's: its questions, keys and answers in kvtier's terms."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

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

from kvtier.cache.block_cache import BlockState
from kvtier.connectors.vllm.offloading.stats import stats_of
from kvtier.connectors.vllm.offloading.translation import HostSlots, request_of, source_of
from kvtier.connectors.vllm.shared.copies import BlocksToStore
from kvtier.connectors.vllm.shared.manager import TierManager
from kvtier.connectors.vllm.shared.prompt import kind_of
from kvtier.connectors.vllm.shared.request_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

RESULTS = {
    BlockState.NOWHERE: LookupResult.MISS,
    BlockState.MEMORY: LookupResult.HIT,
    BlockState.ARRIVING: LookupResult.HIT_PENDING,
    BlockState.STORAGE: LookupResult.RETRY,
    BlockState.UNKNOWN: LookupResult.RETRY,
}


class OffloadedTiers(TierManager, OffloadingManager):
    """``TierManager`` under the interface that vLLM's OffloadingConnector calls."""

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        # Its stores may end after it has finished.
        req_context.set_state(self.begin(request_of(req_context)))
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.finish(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return RESULTS[self.find(key, self.state_of(req_context.req_id))]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return source_of(self.origin(key, _state(req_context)))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.cache.touch(keys)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> HostSlots:
        return HostSlots(self.begin_load(keys, self.state_of(req_context.req_id)))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.end_load(keys, _state(req_context))

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        # vLLM would log a warning for every None.
        blocks = self.begin_store(keys, _state(req_context)) or BlocksToStore()
        return PrepareStoreOutput(blocks.keys, HostSlots(blocks.slots), blocks.evicted)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self.end_stores([(keys, _state(req_context), success)])

    def take_events(self) -> Iterable[OffloadingEvent]:
        for change in self.take_changes():
            medium, locality = kind_of(change.tier)
            yield OffloadingEvent(
                change.keys, Medium(medium), change.is_removed, Locality(locality)
            )

    def get_stats(self) -> OffloadingConnectorStats | None:
        values = self.take_values()
        return None if values is None else stats_of(values)


def _state(context: ReqContext) -> RequestState | None:
    found: RequestState | None = context.get_state(RequestState)
    return found
