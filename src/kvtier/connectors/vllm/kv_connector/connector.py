"""``KvtierConnector``: kvtier on vLLM's connector interface, without ``v1/kv_offload``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvtier.connectors.vllm.kv_connector.config import facts_of, keep_block_hashes
from kvtier.connectors.vllm.kv_connector.events import TierEvents
from kvtier.connectors.vllm.kv_connector.messages import NOTHING, RankMessage, StepMessage
from kvtier.connectors.vllm.kv_connector.rank import RankHalf
from kvtier.connectors.vllm.kv_connector.scheduler import SchedulerHalf, Tracked
from kvtier.connectors.vllm.kv_connector.stats import ConnectorMetrics, ConnectorStats
from kvtier.connectors.vllm.shared.grid import settle_grid
from kvtier.connectors.vllm.shared.halves import Sizes, begin_serving
from kvtier.connectors.vllm.shared.manager import TierManager
from kvtier.connectors.vllm.shared.pages import layer_sizes, tell_pages
from kvtier.connectors.vllm.shared.rank_weights import model_of_caller
from kvtier.connectors.vllm.shared.recording import RequestRecording
from kvtier.connectors.vllm.shared.settings import set_failure_policy
from kvtier.connectors.vllm.shared.shards import division_of, layout_of, shards_of
from kvtier.connectors.vllm.shared.step import DueRequests
from kvtier.connectors.vllm.shared.worker import TierWorker
from kvtier.core.types import Direct

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Message of the scheduler's half, which vLLM carries to all ranks."""

    message: StepMessage

    def __reduce__(self) -> str | tuple[Any, ...]:
        return "IDLE" if self is IDLE else super().__reduce__()


IDLE = StepMetadata(NOTHING)
"""Metadata of a step in which nothing moves: one object in every process, pickled by name."""


@dataclass
class RankMetadata(KVConnectorWorkerMetadata):
    """Messages of the ranks, which vLLM aggregates and carries to the scheduler's process."""

    message: RankMessage

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankMetadata:
        assert isinstance(other, RankMetadata), f"a message of another connector: {type(other)}"
        return RankMetadata(self.message.and_also(other.message))


HAS_GROUPS = vllm.__version_tuple__[:2] >= (0, 28)
"""Whether vLLM's allocator loads into several KV groups. In early versions pages for one group may
evict what another has found; 0.28 is the first one that was run with several."""
REPORTS_REQUESTS = hasattr(KVConnectorBase_V1, "get_transfer_results")
"""Whether a rank can report failed loads by request, as it can from 0.30 on. Of pages vLLM does not
know the group, and older versions end the engine where there are several."""


Groups: Any = SupportsHMA if HAS_GROUPS else object


class KvtierConnector(KVConnectorBase_V1, Groups):
    """kvtier's own connector. vLLM makes one in the scheduler's process and one in each rank.

    For one that is not ``SupportsHMA`` vLLM lays out windows like layers of whole prompts.

    All loads are asynchronous: a request runs after its blocks have arrived.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        set_failure_policy(vllm_config.kv_transfer_config)
        settle_grid(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._sizes = Sizes(facts_of(vllm_config, kv_cache_config), extra)
        self._facts = self._sizes.facts
        self._layers = layer_sizes(kv_cache_config.kv_cache_groups)
        self._num_pages = int(kv_cache_config.num_blocks)
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._rank: RankHalf | None = None
        self._scheduler: SchedulerHalf | None = None
        self._has_news = True  # there may be statistics that were not returned yet
        self.failed_loads = frozenset[str]()
        """Requests to compute that a version before 0.30 believes to be loaded."""
        if role is KVConnectorRole.SCHEDULER:
            self._make_scheduler_half(extra, kv_cache_config)

    def _make_scheduler_half(
        self, extra: Mapping[str, object], kv_cache_config: KVCacheConfig
    ) -> None:
        config = self._vllm_config
        self._sizes.names.needs_layout = True
        keep_block_hashes(config)
        manager = self._sizes.make_manager(TierManager)
        self._scheduler = SchedulerHalf(
            manager,
            self._facts,
            DueRequests.for_config(config),
            bool(extra.get("offload_prompt_only", True)),
            TierEvents(self._facts, self._specs) if self._facts.publishes_events else None,
        )
        self._adapters = begin_serving(self, manager, config, kv_cache_config)
        self._recording = RequestRecording(
            extra, self._half.block_tokens, self._facts.tokens_per_hash, self._facts.replica
        )
        _take_steps_while_busy()
        if len(self._specs) > 1 and not REPORTS_REQUESTS:
            _compute_failed_loads()

    # -- in the scheduler's process ----------------------------------------------------------------

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a rank's side decides nothing"
        return self._scheduler

    def on_new_request(self, request: Request) -> None:
        self._track(request)

    def _track(self, request: Request) -> Tracked:
        """Return a request's state. Before 0.23 vLLM does not report the requests that it adds."""
        if self._half.is_known(request.request_id):
            return self._half.begin(request)
        keyed, scope = self._adapters.begin(request)
        tracked = self._half.begin(keyed)
        tracked.state.scope = scope
        self._recording.begin(request)
        return tracked

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._has_news = True
        num = self._half.num_to_load(self._track(request), num_computed_tokens)
        return num, bool(num)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._half.on_pages(self._track(request), blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        message = self._half.take_step(scheduler_output)
        if message is NOTHING:
            return IDLE
        self._has_news = True
        return StepMetadata(message)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._half.drop_failed(connector_output.invalid_block_ids)
        theirs = connector_output.kv_connector_worker_meta
        if isinstance(theirs, RankMetadata):
            self._has_news = True
            self.failed_loads |= theirs.message.failed
            self._half.hear(theirs.message)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._has_news = True
        self._recording.end(request)
        return self._half.finish(request, block_ids), None

    def has_pending_push_work(self) -> bool:
        return self._half.has_pending_work

    def reset_cache(self) -> bool | None:
        self._half.reset()
        return True

    def reset_for_weights(self) -> None:
        """Empty all tiers: other weights are in memory."""
        self._has_news = True
        self._half.reset()

    def pool_was_emptied(self) -> None:
        self._half.manager.pool_was_emptied()

    def take_events(self) -> Iterable[KVCacheEvent]:
        events = self._half.events
        if events is not None:
            for change in self._half.manager.take_changes():
                yield from events.of(change)

    # -- in both -----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Return the statistics of the scheduler's half; those of a rank are empty.

        Some versions of vLLM query the scheduler's half only if a rank has returned statistics.
        """
        if self._scheduler is None:
            return ConnectorStats() if self._pages.asks_for_statistics() else None
        if not self._has_news:
            return None
        self._has_news = False
        manager = self._scheduler.manager
        self._recording.count_into(manager.counts)
        values = manager.take_values()
        return None if values is None else ConnectorStats.of(values)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorMetrics:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- in a rank ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        pages, shards = tell_pages(kv_caches, self._layers, self._num_pages), None
        if self._sizes.direct is not Direct.OFF:
            pages = pages.in_equal_pieces()
        if self._facts.any_size:
            division = division_of(self._vllm_config, self._sizes.settings)
            every = [layer for layers in self._layers for layer in layers]
            layout = layout_of(every, kv_caches, self._num_pages, division)
            pages = replace(pages, layout=layout)
            shards = shards_of(
                pages,
                self._layers,
                kv_caches,
                division,
                self._facts.pages_per_block,
                self._sizes.slot_bytes,
            )
        worker = self._sizes.make_worker(TierWorker, pages, pages.device, shards)
        worker.watch_weights(model_of_caller())
        if self._sizes.settings.audit:
            worker.audit(kv_caches, self._layers, self._facts)
        self._rank = RankHalf(worker, pages, self._facts.rank < self._facts.num_shards)

    @property
    def _pages(self) -> RankHalf:
        assert self._rank is not None, "vLLM has registered no KV cache"
        return self._rank

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        theirs = self._get_connector_metadata()
        assert type(theirs) is StepMetadata, f"metadata of another connector: {type(theirs)}"
        self._pages.begin_step(theirs.message)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs after all layers of its blocks have arrived."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Do nothing: stores begin when all layers have been computed."""

    def wait_for_save(self) -> None:
        self._pages.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        stored, loaded = self._pages.take_finished()
        return stored or None, loaded or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if len(self._specs) > 1:
            results.failed_recving.update(job.request_id for job in self._pages.take_failed())
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        if len(self._specs) > 1:
            return set()
        return {page for job in self._pages.take_failed() for page in job.pages[0].pages}

    def build_connector_worker_meta(self) -> RankMetadata | None:
        message = self._pages.take_message()
        if message is None:
            return None
        if len(self._specs) > 1:  # with the report that the load has ended
            message.failed = frozenset(job.request_id for job in self._pages.take_failed())
        return RankMetadata(message)

    def shutdown(self) -> None:
        if self._rank is not None:
            self._rank.shutdown()
        if self._scheduler is not None:
            self._scheduler.manager.shutdown()
            self._recording.close()


def _take_steps_while_busy() -> None:
    """Make vLLM's scheduler take steps while its connector has pending work.

    vLLM does so itself from 0.25 on. Older versions take no steps without requests, so blocks
    stored by the last request would reach the disk only with the next request, or never.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    theirs = Scheduler.has_finished_requests
    if hasattr(KVConnectorBase_V1, "has_pending_push_work") or hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def has_finished_requests(self: Any) -> bool:
        return theirs(self) or _has_work(self.connector)

    Scheduler.has_finished_requests = has_finished_requests


def _has_work(connector: Any) -> bool:
    """Return whether a connector, or one inside it (MultiConnector), has work."""
    asks = getattr(connector, "has_pending_push_work", None)
    inside = getattr(connector, "_connectors", ())
    return bool(asks and asks()) or any(map(_has_work, inside))


def _compute_failed_loads() -> None:
    """Make vLLM's scheduler compute requests of several KV groups whose load has failed.

    From 0.30 on vLLM does so itself.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    theirs = Scheduler._update_from_kv_xfer_finished
    if hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def update(self: Any, kv_connector_output: KVConnectorOutput) -> None:
        theirs(self, kv_connector_output)
        for request_id in _take_failed(self.connector):
            request = self.requests.get(request_id)
            if request is not None and request.status.name == "WAITING_FOR_REMOTE_KVS":
                request.num_computed_tokens = 0
                self.failed_recving_kv_req_ids.add(request_id)

    Scheduler._update_from_kv_xfer_finished = update


def _take_failed(connector: Any) -> frozenset[str]:
    """Return the requests whose load failed, of a connector and those inside it, once."""
    failed = getattr(connector, "failed_loads", frozenset[str]())
    if failed:
        connector.failed_loads = frozenset()
    return failed.union(*map(_take_failed, getattr(connector, "_connectors", ())))
