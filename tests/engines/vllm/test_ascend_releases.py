"""KV caches as vllm-ascend's own model runners make them, through both connectors and a fake CANN.

`make peers-ascend` fetches the Python sources of three releases; see ``ascend/sources.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvtier.connectors.vllm.kv_connector.messages import PageJob, StepMessage
from kvtier.connectors.vllm.kv_connector.rank import RankHalf
from kvtier.connectors.vllm.offloading.ascend import split_caches
from kvtier.connectors.vllm.offloading.translation import HostSlots
from kvtier.connectors.vllm.offloading.worker import OffloadedPages
from kvtier.connectors.vllm.shared.copies import BlockSlots, PageRange
from kvtier.connectors.vllm.shared.pages import layer_sizes, tell_pages
from kvtier.connectors.vllm.shared.worker import RankLimits, TierWorker
from kvtier.core.types import Slot
from kvtier.devices import Direction
from tests.devices.drivers import make_device
from tests.engines.vllm.ascend.runner import ALIGNMENT, BLOCK, KINDS, Ascend
from tests.engines.vllm.ascend.sources import FOLDER
from tests.kit.fakes.fake import Fake

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="make peers-ascend fetches the sources")

NUM_PAGES = 6
CASES = [
    (version, kind, connector)
    for version, kinds in KINDS.items()
    for kind in kinds
    for connector in ("own", "offloading")
]
BATCH = "aclrtMemcpyBatchAsync"


def _parts(caches: dict[str, Any]) -> list[torch.Tensor]:
    """Return every tensor of every layer as bytes, with pages first."""
    found = []
    for cache in caches.values():
        for part in [cache] if isinstance(cache, torch.Tensor) else cache:
            assert part.shape[:2] == (NUM_PAGES, BLOCK)
            row = part[0].numel() * part.element_size()
            memory = torch.empty(0, dtype=torch.uint8)
            begin = part.storage_offset() * part.element_size()
            strides = (part.stride(0) * part.element_size(), 1)
            found.append(memory.set_(part.untyped_storage(), begin, (NUM_PAGES, row), strides))
    return found


class _OffloadingRank:
    """A rank of vLLM's OffloadingConnector."""

    def __init__(self, ascend: Ascend, caches: dict[str, Any], *arguments: Any) -> None:
        split = split_caches(caches, ascend.config, [0])
        assert split is not None
        self.page_bytes = sum(each.page_size_bytes for each in split.group_data_refs[0])
        self.worker = OffloadedPages(split, *arguments)

    def begin_store(self, job_id: int, pages: list[int], slots: list[int]) -> None:
        assert self.worker.submit_store(job_id, _spec(pages), _slots(slots))

    def begin_load(self, job_id: int, slots: list[int], pages: list[int]) -> None:
        assert self.worker.submit_load(job_id, _slots(slots), _spec(pages))

    def end(self, job_id: int) -> bool:
        """Wait for a copy. Return whether it is right."""
        self.worker.wait({job_id})
        (ended,) = self.worker.get_finished()
        assert ended.job_id == job_id
        assert ended.success
        return self.worker.take_failed_loads() != [job_id]


class _OwnRank:
    """A rank of ``KvtierConnector``."""

    def __init__(self, ascend: Ascend, caches: dict[str, Any], *arguments: Any) -> None:
        sizes = layer_sizes(ascend.config.kv_cache_groups)
        told = tell_pages(caches, sizes, ascend.config.num_blocks)
        self.page_bytes = sum(share.nbytes for share in told.groups[0])
        self.worker = TierWorker(told, *arguments)
        self._half = RankHalf(self.worker, told)

    def begin_store(self, job_id: int, pages: list[int], slots: list[int]) -> None:
        self._half.begin_step(StepMessage(stores=[_job(job_id, pages, slots)]))
        assert not self.worker.job_ids, "the step's KV is computed first"
        self._half.end_step()

    def begin_load(self, job_id: int, slots: list[int], pages: list[int]) -> None:
        self._half.begin_step(StepMessage(loads=[_job(job_id, pages, slots)]))

    def end(self, job_id: int) -> bool:
        """Wait for a copy. Return whether it is right."""
        (direction,) = [job[1] for job in self._half._jobs.values()]
        self.worker.wait({job_id})
        _, loaded = self._half.take_finished()
        assert loaded == ({"request"} if direction is Direction.LOAD else set())
        return not self._half.take_failed()


def _slots(slots: list[int]) -> HostSlots:
    return HostSlots(BlockSlots([*map(Slot, slots)]))


def _spec(pages: list[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(pages, group_sizes=[len(pages)], block_indices=[0])


def _job(job_id: int, pages: list[int], slots: list[int]) -> PageJob:
    return PageJob(
        job_id, "request", [PageRange(pages)], BlockSlots([Slot(slot) for slot in slots])
    )


RANKS: dict[str, type[_OwnRank | _OffloadingRank]] = {
    "own": _OwnRank,
    "offloading": _OffloadingRank,
}


class _Harness:
    """A rank of kvtier's over the caches of one release, on a fake device."""

    def __init__(
        self, version: str, kind: str, connector: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ascend = Ascend(version, kind, NUM_PAGES)
        caches = ascend.caches()
        self.parts = _parts(caches)
        self.fake = Fake("cann85")
        self._storages = {
            part.untyped_storage().data_ptr(): part.untyped_storage() for part in self.parts
        }
        for address, storage in self._storages.items():
            self.fake.adopt(address, storage.nbytes())
        device = make_device(self.fake)
        monkeypatch.setattr(device, "prepare", lambda: None)  # it may rank any way first
        page_bytes = sum(part.shape[1] for part in self.parts)
        room = RankLimits(-(-page_bytes // 4096) * 4096, num_slots=8)
        self.rank = RANKS[connector](ascend, caches, device, room, 1, 0)
        for seed, part in enumerate(self.parts):
            random = torch.Generator().manual_seed(seed)
            part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, generator=random))

    def close(self) -> None:
        self.rank.worker.shutdown()
        for address in self._storages:
            self.fake.disown(address)


@pytest.fixture
def harness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Harness]:
    version, kind, connector = request.param
    made = _Harness(version, kind, connector, monkeypatch)
    yield made
    made.close()


of_all = pytest.mark.parametrize(
    "harness", CASES, indirect=True, ids=["-".join(each) for each in CASES]
)
of_some = pytest.mark.parametrize(
    "harness",
    [
        ("0.18.0", "mla", "own"),
        ("0.23.0", "dsa_c8", "own"),
        ("0.30.0rc2", "dsa_c8", "offloading"),
    ],
    indirect=True,
)


@of_all
def test_bytes_are_those_of_a_reference_copy_in_one_batch_call_each_way(harness: _Harness) -> None:
    before = [part.clone() for part in harness.parts]
    harness.rank.begin_store(1, [1, 2, 3], [5, 2, 7])
    assert harness.rank.end(1)
    assert harness.fake.count(BATCH) == 1
    harness.rank.begin_load(2, [5, 2, 7], [4, 5, 0])
    assert harness.rank.end(2)
    assert harness.fake.count(BATCH) == 2
    for part, old in zip(harness.parts, before, strict=True):
        expected = old.clone()
        expected[[4, 5, 0]] = old[[1, 2, 3]]
        assert torch.equal(part, expected)
    assert harness.fake.violations == []


@of_all
def test_every_byte_of_a_page_is_copied_and_parts_begin_at_2_mib(harness: _Harness) -> None:
    assert harness.rank.page_bytes == sum(part.shape[1] for part in harness.parts)
    begins = {part.untyped_storage().data_ptr() for part in harness.parts}
    aligned = [part for part in harness.parts if part.data_ptr() % ALIGNMENT == 0]
    assert len(aligned) >= len(begins)


def _runs(shares: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the bytes of page 0 as begins and ends, with neighbours as one."""
    found: list[tuple[int, int]] = []
    for begin, num_bytes in shares:
        is_next = bool(found) and found[-1][1] == begin
        first = found.pop()[0] if is_next else begin
        found.append((first, begin + num_bytes))
    return found


@pytest.mark.parametrize("kind", KINDS["0.30.0rc2"])
def test_vllm_ascends_own_connector_has_the_same_bytes_in_the_same_order(kind: str) -> None:
    ascend = Ascend("0.30.0rc2", kind, NUM_PAGES)
    caches = ascend.caches()
    split = split_caches(caches, ascend.config, [0])
    assert split is not None
    tensors = [split.tensors[ref.tensor_idx] for ref in split.group_data_refs[0]]
    theirs: list[tuple[torch.Tensor, int]] = []
    for name, spec in ascend.specs.items():
        theirs += ascend.split_by_theirs(caches[name], spec.page_size_bytes)
    ours = _runs((tensor.tensor.data_ptr(), tensor.page_size_bytes) for tensor in tensors)
    assert ours == _runs((tensor.data_ptr(), num_bytes) for tensor, num_bytes in theirs)


@of_some
def test_failed_load_is_told_and_the_next_one_is_right(harness: _Harness) -> None:
    before = [part.clone() for part in harness.parts]
    harness.rank.begin_store(1, [1, 2], [1, 2])
    assert harness.rank.end(1)
    harness.fake.fail_entry(1, 507013)  # the copy of the part before is under way
    harness.rank.begin_load(2, [1, 2], [4, 5])
    assert not harness.rank.end(2)
    harness.rank.begin_load(3, [1, 2], [4, 5])
    assert harness.rank.end(3)
    for part, old in zip(harness.parts, before, strict=True):
        assert torch.equal(part[[4, 5]], old[[1, 2]])


@of_some
def test_a_waited_store_has_read_its_pages(harness: _Harness) -> None:
    """A preempted request's pages are used again after the store, if vLLM waits for it."""
    before = [part.clone() for part in harness.parts]
    harness.fake.hold()
    harness.rank.begin_store(1, [2], [3])
    harness.fake.release()
    harness.rank.worker.wait({1})
    for part in harness.parts:
        part[2] = 0  # the page is another request's now
    assert harness.rank.end(1)
    harness.rank.begin_load(2, [3], [2])
    assert harness.rank.end(2)
    for part, old in zip(harness.parts, before, strict=True):
        assert torch.equal(part[2], old[2])
