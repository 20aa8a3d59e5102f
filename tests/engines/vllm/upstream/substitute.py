"""A pytest plug-in for vLLM's own unit tests: kvtier's halves take the place of vLLM's.

- Where a test makes vLLM's host manager, it gets ``Manager``: ours behind its constructor. Which
  free slot is taken first is our own choice; that a load comes from where the store went is not.
- Where a test runs vLLM's scheduler with a mock worker, the mock goes on answering, and every copy
  is also done by kvtier's worker, between the test's tensors and kvtier's slots. The bytes are
  compared: what a load brings is what was stored under that key, page by page.

Loaded by ``-p substitute``. What can't apply to kvtier is skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Collection
from ctypes import c_uint8
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvtier.cache.transfer.ranks import Hello, RankMover, Report
from kvtier.connectors.vllm.offloading.manager import OffloadedTiers
from kvtier.connectors.vllm.offloading.translation import HostSlots
from kvtier.connectors.vllm.offloading.worker import OffloadedPages
from kvtier.connectors.vllm.shared.copies import BlockSlots
from kvtier.connectors.vllm.shared.names import VllmNames
from kvtier.connectors.vllm.shared.prompt import Shape
from kvtier.connectors.vllm.shared.tiers import rank_tiers
from kvtier.connectors.vllm.shared.worker import RankLimits
from kvtier.core.types import HOST, LoadPolicy, Slot
from kvtier.devices import find_device
from kvtier.tiers import HostTier

Bytes = npt.NDArray[np.uint8]

NUM_SLOTS = 2048
ALIGNMENT = 4096

INSIDE = "looks into vLLM's own manager"
POLICY = "about vLLM's own eviction policies"
GAUGES = "vLLM's own gauges of its own tier"
REUSE = "vLLM's own admission filter"
DEVICE = "vLLM's own copies, on CUDA"
WEIGHTS = "wants a model's weights"
DOES_NOT_APPLY = {
    "cpu/test_manager.py::test_filter_reused": REUSE,
    "cpu/test_manager.py::test_store_threshold": REUSE,
    "cpu/test_manager.py::test_cpu_manager_reports": GAUGES,
    "cpu/test_manager.py::test_cpu_manager_clears_write_usage": GAUGES,
    "cpu/test_manager.py::TestARCPolicy": POLICY,
    "cpu/test_manager.py::test_arc": POLICY,
    "cpu/test_manager.py::test_lru_repeated_pin_cycles": INSIDE,
    "cpu/test_manager.py::test_reset_discards_stale": INSIDE,
    "cpu/test_manager.py::test_lru_batch_eviction_failure": INSIDE,
    "cpu/test_manager.py::test_evictable_cache_chunk_count": INSIDE,
    "cpu/test_manager.py::test_touch_forwards": INSIDE,
    "cpu/test_manager.py::test_request_finish_forwards": INSIDE,
    "cpu/test_manager.py::test_failed_store_records": INSIDE,
    "cpu/test_gpu_worker.py": DEVICE,
    "test_multi_connector.py::test_multi_example_connector_consistency": WEIGHTS,
}
"""Parts of test ids, and why these tests are left out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for beginning, reason in DOES_NOT_APPLY.items():
            if beginning in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
        module: Any = getattr(item, "module", None)
        if hasattr(module, "CPUOffloadingManager") and "policies" not in item.nodeid:
            module.CPUOffloadingManager = Manager
            if hasattr(module, "make_offload_key"):
                module.make_offload_key = _make_key
            if hasattr(module, "verify_store_output"):
                module.verify_store_output = _verify_store
                module.verify_load_output = _verify_load
        if hasattr(module, "MockOffloadingSpec") or hasattr(module, "RequestRunner"):
            _substitute_worker()


def pytest_runtest_teardown() -> None:
    while _open:
        _open.pop().shutdown()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"kvtier: {_seen['copies']} copies, {_seen['pages']} loaded pages compared, "
        f"{_seen['blocks']} blocks at most"
    )


class Manager(OffloadedTiers):
    """kvtier's manager with the constructor of vLLM's, and with slots in vLLM's form."""

    medium = Medium.CPU

    def __init__(
        self,
        num_chunks: int,
        cache_policy: str = "lru",
        cache_policy_module_path: str | None = None,
        enable_events: bool = False,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
    ) -> None:
        if cache_policy != "lru" or cache_policy_module_path:
            pytest.skip(POLICY)
        if store_threshold >= 2:
            pytest.skip(REUSE)
        mover, shape = RankMover({}, ALIGNMENT, 1, 1), Shape((16,), ALIGNMENT)
        names = VllmNames(None, ALIGNMENT, "vllm")
        super().__init__(
            rank_tiers(mover, {HOST: num_chunks}, names, shape),
            mover,
            names,
            shape,
            LoadPolicy.ALWAYS,
            publishes_events=enable_events,
        )
        self.hear(Report(hellos={0: Hello(num_chunks)}))
        _named.clear()

    def _must_have_begun(self, req_context: ReqContext, keys: Collection[OffloadKey] = ()) -> None:
        """Begin a request, and give its blocks places in a prompt, if the test left that out."""
        if req_context.req_id not in self._requests:
            self.on_new_request(req_context)
        ends = req_context._offload_key_positions
        for key in keys:
            ends.setdefault(key, 16 * (len(ends) + 1))

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._must_have_begun(req_context)
        return super().lookup(key, req_context)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Any:
        self._must_have_begun(req_context, keys)
        return CPULoadStoreSpec(super().prepare_load(keys, req_context).blocks.slots)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        self._must_have_begun(req_context, keys)
        found = super().prepare_store(keys, req_context)
        if found is not None:
            assert isinstance(found.store_spec, HostSlots)
            found.store_spec = CPULoadStoreSpec(found.store_spec.blocks.slots)
        return found


def _make_key(name: bytes, group: int) -> OffloadKey:
    """Return a key of an engine's length; tests give names of any length."""
    return make_offload_key(sha256(name).digest(), group)


_open: list[OffloadedPages] = []
_seen = {"copies": 0, "pages": 0, "blocks": 0}
_named: dict[int, int] = {}
"""Our slot for the one that a test speaks of."""


def _verify_store(output: Any, expected: Any) -> None:
    """Verify as the tests do, with free slots, and blocks leaving in any order."""
    from tests.v1.kv_offload.cpu.test_manager import to_keys

    assert output is not None
    assert output.keys_to_store == to_keys(expected.keys_to_store)
    assert sorted(output.evicted_keys) == sorted(to_keys(expected.evicted_keys))
    slots = output.store_spec.chunk_ids.tolist()
    assert len(set(slots)) == len(expected.store_chunk_ids)
    _named.update(zip(expected.store_chunk_ids, slots, strict=True))


def _verify_load(output: Any, expected: list[int]) -> None:
    assert output.chunk_ids.tolist() == [_named[each] for each in expected]


def _substitute_worker() -> None:
    from tests.v1.kv_connector.unit.offloading_connector import utils

    if issubclass(utils.MockOffloadingWorker, Copies):
        return

    class Worker(Copies, utils.MockOffloadingWorker):
        pass

    def get_worker(spec: Any, caches: CanonicalKVCaches) -> Worker:
        num_bytes = spec.config.worker_kv_bytes_per_block * spec.blocks_per_chunk
        spec.handler.attach(caches, -(-num_bytes // ALIGNMENT) * ALIGNMENT, spec.blocks_per_chunk)
        handler: Worker = spec.handler
        return handler

    utils.MockOffloadingWorker = Worker
    utils.MockOffloadingSpec.get_worker = get_worker


class Copies:
    """Does the mock's copies with kvtier's worker, and compares the bytes with ``_stored``."""

    def attach(self, caches: CanonicalKVCaches, slot_bytes: int, pages_per_block: int) -> None:
        self._groups = [
            [
                (_bytes_of(caches.tensors[ref.tensor_idx].tensor), ref.page_size_bytes)
                for ref in refs
            ]
            for refs in caches.group_data_refs
        ]
        self._pages_per_block = pages_per_block
        self._slot_bytes = slot_bytes
        room = RankLimits(slot_bytes, NUM_SLOTS)
        self._worker = OffloadedPages(caches, find_device("cpu"), room, pages_per_block, rank=0)
        _open.append(self._worker)
        host = self._worker._host
        assert isinstance(host, HostTier)
        memory = host.memory
        self._slots = np.ctypeslib.as_array(
            (c_uint8 * memory.nbytes).from_address(memory.address)
        ).reshape(NUM_SLOTS, slot_bytes)
        self._slot_of: dict[bytes, int] = {}
        self._stored: dict[tuple[bytes, int, int], Bytes] = {}
        """By key, page of the block, and share."""
        self._random = np.random.default_rng(0)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        if hasattr(self, "_worker"):
            keys = dst_spec.offload_keys
            for key, place, group, page in self._walk(src_spec, keys):
                for share, (tensor, nbytes) in enumerate(self._groups[group]):
                    content = self._random.integers(0, 256, nbytes, np.uint8)
                    tensor[page, :nbytes] = content
                    self._stored[key, place, share] = content
            self._run(self._worker.submit_store(job_id, src_spec, self._places(keys)), job_id)
        answer: bool = super().submit_store(job_id, src_spec, dst_spec)  # type: ignore[misc]
        return answer

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        if hasattr(self, "_worker"):
            keys = src_spec.offload_keys
            places = self._places(keys)
            pages = list(self._walk(dst_spec, keys))
            for key, place, group, _ in pages:
                self._invent(key, place, group)
            self._run(self._worker.submit_load(job_id, places, dst_spec), job_id)
            for key, place, group, page in pages:
                for share, (tensor, nbytes) in enumerate(self._groups[group]):
                    expected = self._stored[key, place, share]
                    assert np.array_equal(tensor[page, :nbytes], expected), (key, place, share)
            _seen["pages"] += len(pages)
        answer: bool = super().submit_load(job_id, src_spec, dst_spec)  # type: ignore[misc]
        return answer

    def _run(self, accepted: bool, job_id: int) -> None:
        assert accepted
        self._worker.wait({job_id})
        (result,) = self._worker.get_finished()
        assert (result.job_id, result.success) == (job_id, True)
        assert not self._worker.take_failed_loads()
        _seen["copies"] += 1

    def _places(self, keys: list[OffloadKey]) -> LoadStoreSpec:
        slots = [self._slot_of.setdefault(key, len(self._slot_of)) for key in keys]
        assert len(self._slot_of) <= NUM_SLOTS, "more blocks than this plug-in has slots"
        _seen["blocks"] = max(_seen["blocks"], len(self._slot_of))
        return HostSlots(BlockSlots([*map(Slot, slots)]))

    def _walk(self, pages: GPULoadStoreSpec, keys: list[OffloadKey]) -> Any:
        """Yield, per page: key of its block, place in the block, group and page id.

        The code follows vLLM's rule, and uses none of kvtier's code.
        """
        page_ids, left = iter(pages.block_ids.tolist()), list(keys)
        for group, (size, index) in enumerate(
            zip(pages.group_sizes, pages.block_indices, strict=True)
        ):
            skipped = index % self._pages_per_block
            for place in range(skipped, skipped + size):
                block, within = divmod(place, self._pages_per_block)
                yield left[block], within, group, next(page_ids)
            left = left[-(-(skipped + size) // self._pages_per_block) if size else 0 :]
        assert not left, "keys without pages"

    def _invent(self, key: bytes, place: int, group: int) -> None:
        """Make up content for blocks that a test reports as stored without storing them."""
        before = 0
        for share, (_, nbytes) in enumerate(self._groups[group]):
            if (key, place, share) not in self._stored:
                content = self._random.integers(0, 256, nbytes, np.uint8)
                begin = before * self._pages_per_block + place * nbytes
                self._slots[self._slot_of[key], begin : begin + nbytes] = content
                self._stored[key, place, share] = content
            before += nbytes


def _bytes_of(tensor: Any) -> Bytes:
    """Return the same memory as [num_pages, share bytes]."""
    view: Bytes = tensor.numpy().view(np.uint8)
    return view
