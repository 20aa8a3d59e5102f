"""``"type": "kvtier"`` among vLLM's ``secondary_tiers``: a slab on disk below vLLM's own host tier.

Bounded, verified, and found again after a restart.

    {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 17179869184,
     "secondary_tiers": [
       {"type": "kvtier", "disk_path": "/nvme/kvtier", "disk_capacity": "200GiB"}]}
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

import numpy as np
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvtier.cache.block_cache import BlockState, TierUsage
from kvtier.cache.storage_only import StorageJob, StorageOnlyCache
from kvtier.connectors.common.opening import open_disk
from kvtier.connectors.vllm.offloading.stats import definitions, stats_of
from kvtier.connectors.vllm.offloading.translation import facts_of, request_of
from kvtier.connectors.vllm.shared import new_weights, weights
from kvtier.connectors.vllm.shared.counts import (
    Counts,
    take_values,
)
from kvtier.connectors.vllm.shared.names import VllmNames
from kvtier.connectors.vllm.shared.prompt import depth
from kvtier.connectors.vllm.shared.weights import vllm_source
from kvtier.connectors.vllm.standalone.settings import TierSettings, current_engine, refuse
from kvtier.core.types import DISK
from kvtier.devices.base import Memory
from kvtier.layout import opaque
from kvtier.observe import Metrics, specs
from kvtier.tiers import Pieces

logger = logging.getLogger(__name__)

FOUND = {
    BlockState.NOWHERE: LookupResult.MISS,
    BlockState.ARRIVING: LookupResult.RETRY,
    BlockState.STORAGE: LookupResult.HIT,
}
QUEUED_SHARE = 2
"""At most one block in this many of the host tier waits for the disk: it can't leave meanwhile."""


class KvtierTier(SecondaryTierManager):
    """kvtier's disk tier, in the scheduler's process.

    After the start, a failure of the disk is a miss or a store that did not happen. At the start,
    settings that can't be used raise ``ConfigError``. A disk that can't be read is left alone, and
    vLLM serves without it.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **config: object,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = TierSettings.read(config)
        refuse(settings)
        self.locality = settings.locality and Locality(settings.locality)
        # An address, no array: vLLM can't release its view while there are arrays over it.
        array = np.asarray(primary_kv_view)
        rows, num_rows = Memory(array.ctypes.data, array.nbytes, "host", None), len(array)
        del array
        self._block_sizes = [
            each * offloading_spec.blocks_per_chunk for each in offloading_spec.tokens_per_block
        ]
        parallel = offloading_spec.config.parallel
        subfolder = f"dp{parallel.data_parallel_index}" if parallel.data_parallel_index else ""
        self._names = VllmNames(
            facts_of(offloading_spec.config),
            self.block_size_bytes,
            f"vllm {vllm.__version__}",
            settings.namespace,
        )
        engine = current_engine()
        if engine is None:  # the user has given a namespace
            self._names.settle([vllm_source(offloading_spec.config.model.name)])
        else:
            weights.settle(self._names, engine)
        # vLLM takes events only where it publishes them.
        publishes = offloading_spec.kv_events_config.enable_kv_cache_events
        if settings.enable_kv_events and not publishes:
            logger.warning("kvtier: enable_kv_events has no effect, vLLM publishes no KV events")
        publishes = publishes and settings.enable_kv_events
        self._disk = open_disk(
            settings.disk_options(subfolder), opaque(self.block_size_bytes), rows
        )
        self._counts, self._metrics = Counts(), Metrics(is_exposed=False)
        self._metrics.keep_observations(specs.SHARED_WITH_VLLM)
        self._first_row = rows.address
        self.slab = StorageOnlyCache(
            self._disk,
            np.array([self.block_size_bytes], np.int64),
            num_rows,
            self._names.digest,
            most_queued=num_rows // QUEUED_SHARE,
            bytes_per_day=settings.bytes_per_day,
            tells_changes=publishes,
            metrics=self._metrics,
        )
        self._job_ids: dict[StorageJob, int] = {}
        new_weights.watch(self)

    def reset_for_weights(self) -> None:
        """Delete all blocks, and keep none until a restart: other weights are in memory.

        vLLM's own host tier still has KV of the old weights, and vLLM does not report when it is
        emptied.
        """
        self.slab.clear()
        self._names.forget()
        self.slab.digest = b""

    def pool_was_emptied(self) -> None:
        """Do nothing: vLLM's host tier may have kept KV of the old weights."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self.slab.digest = self._names.digest

        place = self.slab.locate(key)
        if place is BlockState.NOWHERE and self.slab.adopt([key]):
            place = self.slab.locate(key)
            self._adopt_behind(key, request_of(req_context).in_order())
        return FOUND[place]

    def _adopt_behind(self, key: OffloadKey, prompt: Sequence[OffloadKey]) -> None:
        """Adopt the blocks behind ``key`` in one call; vLLM looks them up next."""
        behind = prompt[prompt.index(key) + 1 :] if key in prompt else []
        self.slab.adopt(behind, stops_at_gap=False)
        self.slab.touch([key, *behind])

    def submit_store(self, job_metadata: TransferJob) -> None:
        self.slab.digest = self._names.digest
        context = job_metadata.req_context
        keys = list(job_metadata.keys)
        depths = [self._depth(key, context) for key in keys]
        job = self.slab.store(keys, depths, self._rows_of(job_metadata))
        self._job_ids[job] = job_metadata.job_id

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        self.slab.costs.planned(len(keys), 0)  # vLLM decides, and loads whatever there is
        job = self.slab.load(keys, self._rows_of(job_metadata))
        self._job_ids[job] = job_metadata.job_id

    def _rows_of(self, job: TransferJob) -> Pieces:
        """Return the rows of vLLM's host memory that a job's blocks are in, or are read to."""
        num_bytes = self.block_size_bytes
        begins = self._first_row + num_bytes * np.asarray(job.chunk_ids, np.int64)
        return Pieces.whole(begins, num_bytes)

    def _depth(self, key: OffloadKey, context: ReqContext) -> int:
        block_size = self._block_sizes[get_offload_group_idx(key)]
        return depth(context.get_offload_key_position(key) or 0, block_size)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished = self.slab.take_finished()
        for job in finished:
            self._counts.add(specs.VLLM_LOADED_CHUNKS, len(job.keys) if job.is_load else 0, DISK)
        return [
            JobResult(
                self._job_ids.pop(job),
                job.is_whole,
                tuple(job.keys) if job.is_load and not job.is_whole else None,
                job.seconds,
                len(job.keys) * self.block_size_bytes,
            )
            for job in finished
        ]

    def has_pending_work(self) -> bool:
        return self.slab.num_jobs > 0

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.slab.touch(keys)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Mark the whole prompt as used, including blocks that vLLM had in its own memory.

        The prompt's first blocks are evicted last.
        """
        self.slab.touch(request_of(req_context).in_order())

    def take_events(self) -> Iterable[OffloadingEvent]:
        return [
            OffloadingEvent(change.keys, self.medium, change.is_removed, self.locality)
            for change in self.slab.take_changes()
        ]

    def drain_jobs(self) -> None:
        self.slab.drain()

    def shutdown(self) -> None:
        self._names.close()
        self.slab.close()

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, object]
    ) -> dict[str, OffloadingMetricMetadata]:
        return definitions(specs.UNDER_VLLM)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return statistics of the disk. vLLM reports those of its own host tier."""
        usage = {DISK: TierUsage(self.slab.num_blocks, self._disk.num_blocks)}
        numbers = take_values(self._counts, self._metrics, usage)
        if numbers is None:
            return None
        stats = stats_of(numbers)
        unclaimed = specs.VLLM_UNCLAIMED_CHUNKS.registered_name
        stats.set_gauge(unclaimed, self._disk.num_unindexed, (DISK,))
        return stats
