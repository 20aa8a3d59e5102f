"""vLLM's offloading worker over kvtier's, and vLLM's tensors as shares of a pool."""

from __future__ import annotations

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvtier.connectors.common.paged_pool import PoolShare
from kvtier.connectors.vllm.offloading.translation import HostSlots
from kvtier.connectors.vllm.shared.copies import PageRange
from kvtier.connectors.vllm.shared.pages import EnginePages
from kvtier.connectors.vllm.shared.worker import RankLimits, TierWorker
from kvtier.devices import Device, Direction


class OffloadedPages(TierWorker, OffloadingWorker):
    """``TierWorker`` under the interface that vLLM's OffloadingConnector calls.

    It reports every copy to vLLM as successful. Failures are reported by ``take_failed_loads`` and
    ``take_report``.
    """

    def __init__(
        self,
        caches: CanonicalKVCaches,
        device: Device,
        limits: RankLimits,
        pages_per_block: int,
        rank: int,
    ) -> None:
        super().__init__(pages_of(caches), device, limits, pages_per_block, rank)
        self._failed_loads: list[int] = []
        self._loads: set[int] = set()

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._submit(job_id, src_spec, dst_spec, Direction.STORE)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        return self._submit(job_id, dst_spec, src_spec, Direction.LOAD)

    def _submit(
        self, job_id: int, pages: GPULoadStoreSpec, slots: LoadStoreSpec, direction: Direction
    ) -> bool:
        assert isinstance(slots, HostSlots), f"slots of another manager: {type(slots)}"
        ranges, at = [], 0
        for count, index in zip(pages.group_sizes, pages.block_indices, strict=True):
            of_group = pages.block_ids[at : at + count].tolist()
            ranges.append(PageRange(of_group, index % self.pages_per_block))
            at += count
        if direction is Direction.LOAD:
            self._loads.add(job_id)
        self.submit(job_id, ranges, slots.blocks, direction)
        return True

    def get_finished(self) -> list[TransferResult]:
        ended = self.take_ended()
        self._failed_loads += [
            each.job_id for each in ended if each.has_failed and each.job_id in self._loads
        ]
        self._loads.difference_update(each.job_id for each in ended)
        return [
            TransferResult(each.job_id, True, each.num_bytes, each.seconds)
            if each.num_bytes
            else TransferResult(each.job_id, True)  # no speed to learn from
            for each in ended
        ]

    def take_failed_loads(self) -> list[int]:
        """Return the ids of failed loads, which were reported to vLLM as successful."""
        failed, self._failed_loads = self._failed_loads, []
        return failed


def pages_of(caches: CanonicalKVCaches) -> EnginePages:
    """Return vLLM's canonical tensors as shares, by group."""
    tensors = [tensor.tensor for tensor in caches.tensors]
    for tensor in tensors:
        assert tensor.stride(-1) == 1, f"the bytes of a page are {tensor.stride(-1)} apart"
    groups = [
        [
            PoolShare(
                tensors[ref.tensor_idx].data_ptr(),
                tensors[ref.tensor_idx].stride(0) * tensors[ref.tensor_idx].element_size(),
                ref.page_size_bytes,
            )
            for ref in refs
        ]
        for refs in caches.group_data_refs
    ]
    return EnginePages(groups, tensors[0].shape[0], tensors)
