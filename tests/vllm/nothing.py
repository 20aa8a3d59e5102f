"""A spec that keeps nothing: vLLM with its OffloadingConnector, and no tier behind it.

With that connector vLLM lays its pool out in another way, and its sums come out in another order:
in the sixth digit its answers are not those that it gives without. So this is what to compare with.
"""

from __future__ import annotations

from collections.abc import Collection

from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
)


class Nowhere(BlockIDsLoadStoreSpec):
    """No slots."""


class NothingManager(OffloadingManager):
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        raise AssertionError("nothing is there to be loaded")

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        return PrepareStoreOutput([], Nowhere([]), [])

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()


class NothingWorker(OffloadingWorker):
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        raise AssertionError("nothing is stored")

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        raise AssertionError("nothing is loaded")

    def get_finished(self) -> list[TransferResult]:
        return []

    def wait(self, job_ids: set[int]) -> None:
        pass


class NothingSpec(OffloadingSpec):
    def get_manager(self) -> OffloadingManager:
        return NothingManager()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return NothingWorker()
