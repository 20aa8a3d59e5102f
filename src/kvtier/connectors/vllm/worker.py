"""A rank's side: copies between vLLM's tensors and the slots of this rank's host memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvtier.connectors.vllm.manager import HostSlots
from kvtier.connectors.vllm.pages import ChunkPart, Page, PagedPool
from kvtier.devices import Device, Direction
from kvtier.layout import Attention, DType, KVGroup, Part
from kvtier.tiers import HostTier
from kvtier.transfer import Job, TransferEngine

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 10.0


class HostWorker(OffloadingWorker):
    """Copies what the scheduler asks for, each direction on a thread and a stream of its own.

    A store starts after the compute that was queued when it was submitted, a load after what may
    still read the blocks that it overwrites. slot_bytes, num_slots: of this rank.
    """

    def __init__(
        self,
        caches: CanonicalKVCaches,
        device: Device,
        num_slots: int,
        slot_bytes: int,
        blocks_per_chunk: int,
    ) -> None:
        self._device = device
        self._blocks_per_chunk = blocks_per_chunk
        self._pool = _pool(caches, blocks_per_chunk, slot_bytes)
        device.prepare()
        # A slot is opaque: one part of so many bytes.
        opaque = (Part("chunk", 1, slot_bytes),)
        group = KVGroup(Attention.FULL, 1, opaque, DType.UINT8, block_size=1)
        self._host = HostTier(group, num_slots * slot_bytes, device)
        self._engine = TransferEngine(device)
        self._jobs: dict[int, Job] = {}
        for finding in (*device.findings(), *self._host.findings()):
            logger.info("kvtier %s: %s %s", finding.topic, finding.found, finding.note)

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

    def get_finished(self) -> list[TransferResult]:
        done = [(job_id, job) for job_id, job in self._jobs.items() if job.done]
        return [self._finish(job_id, job) for job_id, job in done]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids:
            if (job := self._jobs.get(job_id)) is not None:
                job.wait()

    def shutdown(self) -> None:
        if self._engine.close(CLOSE_WAIT_S):
            self._host.close()
            self._device.close()

    def _submit(
        self, job_id: int, blocks: GPULoadStoreSpec, slots: LoadStoreSpec, direction: Direction
    ) -> bool:
        assert isinstance(slots, HostSlots)
        batch = self._pool.stage(self._parts(blocks, slots), self._host.memory, direction)
        self._jobs[job_id] = self._engine.submit([batch], direction)
        return True

    def _parts(self, blocks: GPULoadStoreSpec, slots: HostSlots) -> list[ChunkPart]:
        """By group, which blocks belong to which of the slots."""
        parts, block_at, slot_at = [], 0, 0
        for count, index in zip(blocks.group_sizes, blocks.block_indices, strict=True):
            first = index % self._blocks_per_chunk
            num_chunks = -(-(first + count) // self._blocks_per_chunk) if count else 0
            parts.append(
                ChunkPart(
                    blocks.block_ids[block_at : block_at + count].tolist(),
                    slots.block_ids[slot_at : slot_at + num_chunks].tolist(),
                    first,
                )
            )
            block_at, slot_at = block_at + count, slot_at + num_chunks
        assert slot_at == len(slots.block_ids), "slots that no block belongs to"
        return parts

    def _finish(self, job_id: int, job: Job) -> TransferResult:
        del self._jobs[job_id]
        if job.error is not None:
            logger.error("kvtier copy failed job=%d error=%s", job_id, job.error)
        return TransferResult(job_id, job.error is None, job.num_bytes, job.seconds)


def _pool(caches: CanonicalKVCaches, blocks_per_chunk: int, slot_bytes: int) -> PagedPool:
    """vLLM's tensors as pages, by group."""
    tensors = [each.tensor for each in caches.tensors]
    for tensor in tensors:
        assert tensor.stride(-1) == 1, f"the bytes of a block are {tensor.stride(-1)} apart"
    groups: list[Sequence[Page]] = [
        [
            Page(
                tensors[ref.tensor_idx].data_ptr(),
                tensors[ref.tensor_idx].stride(0) * tensors[ref.tensor_idx].element_size(),
                ref.page_size_bytes,
            )
            for ref in refs
        ]
        for refs in caches.group_data_refs
    ]
    first = tensors[0]
    return PagedPool(
        groups, first.shape[0], blocks_per_chunk, slot_bytes, first.device.type, tensors
    )
