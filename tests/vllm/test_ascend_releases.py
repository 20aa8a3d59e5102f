"""KV caches as vllm-ascend's own model runners make them, through kvtier's worker and a fake CANN.

`make peers-ascend` fetches the Python sources of three releases; see ``ascend/sources.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvtier.connectors.vllm.offloading.ascend import split_caches
from kvtier.connectors.vllm.offloading.host_slots import HostSlots
from kvtier.connectors.vllm.offloading.worker import OffloadedPages
from kvtier.connectors.vllm.worker import RankRoom
from tests.devices.drivers import make_device
from tests.fakes.fake import Fake
from tests.vllm.ascend.runner import ALIGNMENT, BLOCK, KINDS, Ascend
from tests.vllm.ascend.sources import FOLDER

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="make peers-ascend fetches the sources")

NUM_PAGES = 6
CASES = [(version, kind) for version, kinds in KINDS.items() for kind in kinds]
BATCH = "aclrtMemcpyBatchAsync"


def _parts(caches: dict[str, Any]) -> list[torch.Tensor]:
    """Return every tensor of every layer as bytes, with pages first."""
    found = []
    for each in caches.values():
        for part in [each] if isinstance(each, torch.Tensor) else each:
            assert part.shape[:2] == (NUM_PAGES, BLOCK)
            row = part[0].numel() * part.element_size()
            memory = torch.empty(0, dtype=torch.uint8)
            begin = part.storage_offset() * part.element_size()
            strides = (part.stride(0) * part.element_size(), 1)
            found.append(memory.set_(part.untyped_storage(), begin, (NUM_PAGES, row), strides))
    return found


class _World:
    """A worker of kvtier's over the caches of one release, on a fake device."""

    def __init__(self, version: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        ascend = Ascend(version, kind, NUM_PAGES)
        self.caches = ascend.caches()
        self.parts = _parts(self.caches)
        self.fake = Fake("cann85")
        self._storages = {
            part.untyped_storage().data_ptr(): part.untyped_storage() for part in self.parts
        }
        for address, storage in self._storages.items():
            self.fake.adopt(address, storage.nbytes())
        caches = split_caches(self.caches, ascend.config, [0])
        assert caches is not None
        self.num_shares = len(caches.group_data_refs[0])
        self.page_bytes = sum(each.page_size_bytes for each in caches.group_data_refs[0])
        device = make_device(self.fake)
        monkeypatch.setattr(device, "prepare", lambda: None)  # it may rank any way first
        slot_bytes = -(-self.page_bytes // 4096) * 4096
        self.worker = OffloadedPages(caches, device, RankRoom(slot_bytes, 8), 1, rank=0)
        for seed, part in enumerate(self.parts):
            random = torch.Generator().manual_seed(seed)
            part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, generator=random))

    def close(self) -> None:
        self.worker.shutdown()
        for address in self._storages:
            self.fake.disown(address)

    def end(self, job_id: int) -> list[int]:
        """Wait for a copy. Return the loads that failed."""
        self.worker.wait({job_id})
        (ended,) = self.worker.get_finished()
        assert ended.job_id == job_id
        assert ended.success
        return self.worker.take_failed_loads()


@pytest.fixture
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[_World]:
    version, kind = request.param
    made = _World(version, kind, monkeypatch)
    yield made
    made.close()


def pages(*ids: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(ids), group_sizes=[len(ids)], block_indices=[0])


@pytest.mark.parametrize("world", CASES, indirect=True, ids=["-".join(each) for each in CASES])
def test_bytes_are_those_of_a_reference_copy_in_one_batch_call_each_way(world: _World) -> None:
    before = [part.clone() for part in world.parts]
    slots = HostSlots([5, 2, 7])
    assert world.worker.submit_store(1, pages(1, 2, 3), slots)
    assert world.end(1) == []
    assert world.fake.count(BATCH) == 1
    assert world.worker.submit_load(2, slots, pages(4, 5, 0))
    assert world.end(2) == []
    assert world.fake.count(BATCH) == 2
    for part, old in zip(world.parts, before, strict=True):
        expected = old.clone()
        expected[[4, 5, 0]] = old[[1, 2, 3]]
        assert torch.equal(part, expected)
    assert world.fake.violations == []


@pytest.mark.parametrize("world", CASES, indirect=True, ids=["-".join(each) for each in CASES])
def test_every_byte_of_a_page_is_copied_and_parts_begin_at_2_mib(world: _World) -> None:
    assert world.page_bytes == sum(part.shape[1] for part in world.parts)
    begins = {part.untyped_storage().data_ptr() for part in world.parts}
    aligned = [part for part in world.parts if part.data_ptr() % ALIGNMENT == 0]
    assert len(aligned) >= len(begins)


@pytest.mark.parametrize("world", [("0.18.0", "mla"), ("0.30.0rc2", "dsa_c8")], indirect=True)
def test_failed_load_is_told_and_the_next_one_is_right(world: _World) -> None:
    before = [part.clone() for part in world.parts]
    slots = HostSlots([1, 2])
    world.worker.submit_store(1, pages(1, 2), slots)
    assert world.end(1) == []
    world.fake.fail_entry(1, 507013)  # the copy of the part before is under way
    world.worker.submit_load(2, slots, pages(4, 5))
    assert world.end(2) == [2]
    world.worker.submit_load(3, slots, pages(4, 5))
    assert world.end(3) == []
    for part, old in zip(world.parts, before, strict=True):
        assert torch.equal(part[[4, 5]], old[[1, 2]])


@pytest.mark.parametrize("world", [("0.23.0", "kv"), ("0.23.0", "dsa_c8")], indirect=True)
def test_pages_of_a_preempted_request_are_used_again_only_after_their_store(world: _World) -> None:
    """As vLLM's half does in ``handle_preemptions``: the store is begun, and waited for."""
    before = [part.clone() for part in world.parts]
    slots = HostSlots([3])
    world.fake.hold()
    world.worker.submit_store(1, pages(2), slots)
    world.fake.let_go()
    world.worker.wait({1})
    for part in world.parts:
        part[2] = 0  # the page is another request's now
    assert world.end(1) == []
    world.worker.submit_load(2, slots, pages(2))
    assert world.end(2) == []
    for part, old in zip(world.parts, before, strict=True):
        assert torch.equal(part[2], old[2])
