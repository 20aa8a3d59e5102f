"""vLLM's OffloadingConnector, with a way for orders to the ranks, and a way back.

    scheduler process                                   each rank
    advise, num_worth_loading  (promotion.py)
    orders  ---- TierMetadata, once a step --->  carry_out   (worker.py)
    hear    <--- TierWorkerMetadata -----------  take_report

Everything else is vLLM's: which blocks, which groups, when to store, when a request waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvtier.cache.transfer.ranks import RankOrder, Report
from kvtier.connectors.vllm.offloading.ascend import split_caches
from kvtier.connectors.vllm.offloading.manager import OffloadedTiers
from kvtier.connectors.vllm.offloading.recording import Finished, RecordedConnector, recorded
from kvtier.connectors.vllm.offloading.spec import KvtierSpec
from kvtier.connectors.vllm.offloading.worker import OffloadedPages
from kvtier.connectors.vllm.shared.grid import grids_of, settle_grid
from kvtier.connectors.vllm.shared.halves import begin_serving
from kvtier.connectors.vllm.shared.key_scope import Doubt
from kvtier.connectors.vllm.shared.pages import EnginePages, LayerSize, layer_sizes
from kvtier.connectors.vllm.shared.rank_weights import model_of_caller
from kvtier.connectors.vllm.shared.recording import record_settings
from kvtier.connectors.vllm.shared.registry import CONNECTOR_NAME
from kvtier.connectors.vllm.shared.request_state import RequestState
from kvtier.connectors.vllm.shared.settings import set_failure_policy
from kvtier.connectors.vllm.shared.shards import division_of, shards_of
from kvtier.connectors.vllm.shared.step import DueRequests, QueuedRequests, prefill_pieces
from kvtier.connectors.vllm.standalone.settings import engine_of
from kvtier.tiers.wrappers import Shards

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

T = TypeVar("T")


@dataclass
class TierMetadata(OffloadingConnectorMetadata):
    """Jobs of a step, vLLM's and kvtier's.

    Attributes:
        orders: kvtier's transfers between host memory and storage.
        step: number of the step if the ranks report its end, else None.
        computes: whether the model runs in this step.
        weights: how often the weights were replaced, as far as the scheduler's half knows.
    """

    orders: Sequence[RankOrder] = ()
    step: int | None = None
    computes: bool = True
    weights: int = 0

    def __reduce__(self) -> str | tuple[Any, ...]:
        return "NOTHING" if self is NOTHING else super().__reduce__()


NOTHING = TierMetadata({}, {})
"""Metadata of a step in which nothing moves: one immutable object in every process."""


@dataclass
class TierWorkerMetadata(OffloadingWorkerMetadata):
    """A rank's finished jobs of vLLM, and its report to kvtier's scheduler half."""

    report: Report = field(default_factory=Report)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        both = super().aggregate(other)
        theirs = other.report if isinstance(other, TierWorkerMetadata) else Report()
        return _with(TierWorkerMetadata, both, report=self.report.and_also(theirs))


class KvtierOffloadingConnector(RecordedConnector):
    """Made in the scheduler's process and in each rank, for ``KvtierSpec``.

    For any other spec it is vLLM's own connector that is made, recording where that is wanted.
    """

    theirs: type = OffloadingConnector

    def __new__(
        cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> Any:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if not issubclass(OffloadingSpecFactory.get_spec_cls(extra), KvtierSpec):
            is_there = isinstance(cls.theirs, type)  # else it says why when it is called
            records = is_there and bool(record_settings(extra).record)
            made = recorded(cls.theirs) if records else cls.theirs
            with engine_of(vllm_config):
                return made(vllm_config, role, kv_cache_config)
        return super().__new__(cls)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        set_failure_policy(vllm_config.kv_transfer_config)
        settle_grid(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        (self._grid,) = grids_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._loading: dict[int, str] = {}
        self._steps: list[int] = []
        self._due = DueRequests.for_config(vllm_config)
        self._is_due = True  # vLLM's half has work for the next step, whichever requests run in it
        self._has_stores = False  # in a rank: that vLLM's half begins in the next step
        self._has_ended = False  # in a rank: vLLM's half may have something to report
        self._has_news = True  # statistics or events, in the scheduler's process
        if not self.connector_scheduler:
            return
        config = self.scheduler.config
        group = config.kv_group_configs[0]
        self._queued = QueuedRequests(
            group.tokens_per_chunk // config.tokens_per_hash,
            group.group_idx,
            self._manager.wait,
        )
        self._adapters = begin_serving(self, self._manager, vllm_config, kv_cache_config)

    # -- in the scheduler's process ----------------------------------------------------------------

    @cached_property
    def _manager(self) -> OffloadedTiers:
        manager = self.scheduler.manager
        assert isinstance(manager, OffloadedTiers), f"{type(manager)} is not ours"
        return manager

    def on_new_request(self, request: Request) -> None:
        keyed, scope = self._adapters.begin(request)
        super().on_new_request(keyed)
        self._queued.on_queued(keyed)
        state = self._manager.state_of(request.request_id)
        state.scope, state.request.source = scope, keyed

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens to load, as vLLM's, but only where loading pays.

        No request waits longer than computing would take.
        """
        self._has_news = True
        theirs = super().get_num_new_matched_tokens
        state = self._manager.state_of(request.request_id)

        def look_up() -> int | None:
            found: int | None = theirs(request, num_computed_tokens)[0]
            if found and self._grid:  # vLLM would compute the last token of a whole prompt alone
                end = (request.num_tokens - 1) // self._grid * self._grid
                found = max(0, min(found, end - num_computed_tokens))
            return found

        num = self._manager.num_to_load(state, num_computed_tokens, request.num_tokens, look_up)
        return num, bool(num)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._is_due = True
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        theirs: KVConnectorMetadata = NOTHING
        due = self._due.reduce(scheduler_output, self._is_due)
        if due is not None:
            self._is_due, self._has_news = False, True
            theirs = super().build_connector_meta(due)
        for new in scheduler_output.scheduled_new_reqs:
            self._queued.on_dequeued(new.req_id)
        self._queued.end_step()
        orders = self._manager.take_orders()
        computes = bool(scheduler_output.num_scheduled_tokens)
        if due is None and computes and not orders:
            return NOTHING
        pieces = prefill_pieces(scheduler_output)
        step = self._manager.steps.begin(time.monotonic(), pieces)
        return _with(
            TierMetadata,
            theirs,
            orders=orders,
            step=step,
            computes=computes,
            weights=self._manager.num_new_weights,
        )

    def request_finished(self, request: Request, block_ids: list[int]) -> Finished:
        self._goes(request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> Finished:
        self._goes(request)
        return super().request_finished_all_groups(request, block_ids)

    def _goes(self, request: Request) -> None:
        self._has_news = True
        self._queued.on_dequeued(request.request_id)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if connector_output.invalid_block_ids:
            self._doubt_stores()
        if meta is None:
            return
        self._has_news = True
        if isinstance(meta, TierWorkerMetadata):
            if meta.report.has_new_weights:
                self.reset_for_weights()
            self._manager.hear(meta.report)
            loads = meta.transfer_stats.load
            self._manager.observe_loads(loads.sizes, loads.time)
        super().update_connector_output(connector_output)

    def _doubt_stores(self) -> None:
        """Discard the stores in flight: another connector failed to load pages of some request.

        What a request has computed behind such pages is wrong, too. vLLM computes it again.
        """
        scheduler = self.scheduler
        for job in scheduler._jobs.values():
            status = scheduler._req_status.get(job.req_id) if job.is_store else None
            state = status and status.req_context.get_state(RequestState)
            if state is not None:
                state.scope.doubts |= Doubt.PAGES

    def reset_cache(self) -> bool | None:
        self._is_due = self._has_news = True
        is_done: bool | None = super().reset_cache()
        return is_done

    def reset_for_weights(self) -> None:
        """Empty all tiers: other weights are in memory."""
        self._is_due = self._has_news = True
        # vLLM's half asserts that it has none to flush. The next step flushes these, too.
        flushed = self.scheduler._current_batch_jobs_to_flush
        self.scheduler._current_batch_jobs_to_flush = set()
        super().reset_cache()
        self.scheduler._current_batch_jobs_to_flush |= flushed

    def pool_was_emptied(self) -> None:
        self._manager.pool_was_emptied()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.connector_scheduler is None or not self._has_news:
            return None
        if self._recording is not None:
            self._recording.count_into(self._manager.counts)
        return super().get_kv_connector_stats()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the events, or nothing if there is no news. vLLM calls it last in a step."""
        if not self._has_news:
            return ()
        self._has_news = False
        events: Iterable[KVCacheEvent] = super().take_events()
        return events

    # -- in a rank ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register KV caches as vLLM or the platform does; split K and V if neither does."""
        worker, spec = self.connector_worker, self._spec
        groups = [group.group_id for group in spec.config.groups]
        if spec.sizes.facts.any_size:
            spec.cut = self._cut(kv_caches, groups)
        split = None
        if type(worker) is OffloadingConnectorWorker:
            split = split_caches(kv_caches, worker.kv_cache_config, groups)
        if split is None:
            super().register_kv_caches(kv_caches)
        else:
            worker._init_worker(split)
        self._worker.watch_weights(model_of_caller())
        if spec.sizes.settings.audit:
            self._worker.audit(kv_caches, self._layers(groups), spec.sizes.facts)

    def _cut(
        self, kv_caches: dict[str, torch.Tensor], groups: Sequence[int]
    ) -> Callable[[EnginePages], Shards]:
        """Return the function that cuts this rank's blocks into shards."""
        assert self.connector_worker is not None, "the scheduler's side has no ranks"
        sizes, layers = self._spec.sizes, self._layers(groups)
        division = division_of(self._vllm_config, sizes.settings)
        num_pages, slot_bytes = sizes.facts.pages_per_block, sizes.slot_bytes
        return lambda pages: shards_of(pages, layers, kv_caches, division, num_pages, slot_bytes)

    def _layers(self, groups: Sequence[int]) -> list[list[LayerSize]]:
        """Return the layers of KV groups of vLLM's."""
        assert self.connector_worker is not None, "the scheduler's side has no ranks"
        every = self.connector_worker.kv_cache_config.kv_cache_groups
        return layer_sizes([every[group] for group in groups])

    @property
    def _spec(self) -> KvtierSpec:
        assert self.connector_worker is not None, "the scheduler's side has no ranks"
        assert isinstance(self.connector_worker.spec, KvtierSpec), "another spec's worker"
        return self.connector_worker.spec

    @cached_property
    def _worker(self) -> OffloadedPages:
        assert self.connector_worker is not None, "the scheduler's side has no worker"
        assert isinstance(self.connector_worker.worker, OffloadedPages), "another spec's worker"
        return self.connector_worker.worker

    @property
    def _step(self) -> TierMetadata:
        meta = self._connector_metadata
        assert isinstance(meta, TierMetadata), f"metadata of another connector: {type(meta)}"
        return meta

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if kv_connector_metadata is not NOTHING or self._has_stores:
            super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        meta = self._step
        if meta is NOTHING and not self._has_stores:
            return
        if meta is not NOTHING:
            self._worker.note_weights(meta.weights)
        super().start_load_kv(forward_context, **kwargs)
        self._has_stores = False
        self._loading.update((job_id, job.req_id) for job_id, job in meta.load_jobs.items())
        if meta.step is not None:
            self._steps.append(meta.step)
        for order in meta.orders:
            self._worker.carry_out(order)
        if not meta.computes:
            self._worker.rest()

    def wait_for_save(self) -> None:
        meta = self._step
        if meta is not NOTHING:
            super().wait_for_save()
            self._has_stores, self._has_ended = bool(meta.store_jobs), True

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return vLLM's results, with the requests whose load failed, which vLLM then recomputes.

        vLLM 0.30 queues the step's stores here, later versions in ``wait_for_save``.
        """
        meta = self._step
        if meta is not NOTHING:
            self._has_stores |= bool(meta.store_jobs)
        elif not self._worker.job_ids:
            return KVConnectorTransferResults()
        self._has_ended = True
        results = super().get_transfer_results(finished_req_ids)
        for job_id in self._worker.take_failed_loads():
            results.failed_recving.add(self._loading[job_id])
        still = self._worker.job_ids
        self._loading = {job: req for job, req in self._loading.items() if job in still}
        return results

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        theirs = super().build_connector_worker_meta() if self._has_ended else None
        self._has_ended = False
        if theirs is None and not self._steps and not self._worker.may_report():
            return None
        report = self._worker.take_report(frozenset(self._steps))
        self._steps.clear()
        if theirs is None and not report:
            return None
        # Ours in any case: vLLM has the first rank's metadata take in those of the others.
        return _with(TierWorkerMetadata, theirs or OffloadingWorkerMetadata(), report=report)


KvtierOffloadingConnector.__name__ = CONNECTOR_NAME


def _with(kind: type[T], theirs: Any, **ours: object) -> T:
    """vLLM's dataclass, with fields of ours behind its own, however many it has."""
    return kind(**{each.name: getattr(theirs, each.name) for each in fields(theirs)} | ours)
