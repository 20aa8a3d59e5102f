"""vLLM's own host tier on a CPU: its manager, and a worker that copies at once.

vLLM's own worker copies from accelerators only.
"""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class PlainWorker(OffloadingWorker):
    """Copies pages of one KV group, one page a block."""

    def __init__(self, caches: CanonicalKVCaches, num_blocks: int) -> None:
        self._pages = [tensor.tensor for tensor in caches.tensors]
        self._kept = [page.new_empty((num_blocks, *page.shape[1:])) for page in self._pages]
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        for pages, kept in zip(self._pages, self._kept, strict=True):
            kept[torch.as_tensor(dst_spec.block_ids)] = pages[torch.as_tensor(src_spec.block_ids)]
        return self._end(job_id, len(src_spec.block_ids))

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        for pages, kept in zip(self._pages, self._kept, strict=True):
            pages[torch.as_tensor(dst_spec.block_ids)] = kept[torch.as_tensor(src_spec.block_ids)]
        return self._end(job_id, len(dst_spec.block_ids))

    def _end(self, job_id: int, num_blocks: int) -> bool:
        num_bytes = num_blocks * sum(page[0].nbytes for page in self._pages)
        self._done.append(TransferResult(job_id, True, num_bytes, 1e-3))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: every copy has ended."""


class PlainSpec(CPUOffloadingSpec):
    """``"spec_name": "PlainSpec"`` with ``"spec_module_path"`` of this file."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return PlainWorker(kv_caches, self.num_chunks)
