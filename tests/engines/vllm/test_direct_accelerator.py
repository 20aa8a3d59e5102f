"""Blocks are read from a disk directly into an engine's pages on an accelerator.

Each layer is an allocation, or several layers are one. The bytes that arrive are the same as
through host memory, and no others change.

Every test also fails if a fake saw a call that hardware might punish, or a resource that was not
released.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvtier.cache.transfer import LocalMover
from kvtier.cache.transfer.ranks import Verb
from kvtier.connectors.vllm.shared import halves
from kvtier.core.errors import ConfigError
from kvtier.core.types import DISK, Direct, Verify
from kvtier.devices import Fence
from kvtier.devices.synchronous import Passed
from tests.devices.drivers import make_device
from tests.engines.vllm.replica import NUM_PAGES as REPLICAS_PAGES
from tests.engines.vllm.replica import PAGE_BYTES, Replica
from tests.engines.vllm.test_direct import (
    GQA,
    LIKE_GROUPS,
    MLA,
    NAMES,
    NUM_PAGES,
    SMALL_GROUP,
    TO_PAGES,
    Rank,
    _random,
    check_blocks,
    check_damaged,
    check_groups,
    in_slots,
    order,
)
from tests.kit.fakes.storage import LIBRARIES, Fault, StorageFake
from tests.tiers.disk.accelerated import KINDS, on_fake

PREFIXES = {"cuda": "cuFile", "hip": "hipFile", "ascend": "NdsFile"}
PARTS_PER_LAYER = 2
"""K and V of a layer, or its latent and its rotary part, are one allocation."""


class OnDevice(torch.Tensor):
    """Memory that a fake counts as its device's."""

    kind = ""

    @property
    def device(self) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(type=self.kind, index=0)


def on_device(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.as_subclass(OnDevice)
    made.kind = kind
    return made


def layers(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return tensors [NUM_PAGES, size]; the ones of a layer share a page-aligned allocation."""
    made = []
    for at in range(0, len(sizes), PARTS_PER_LAYER):
        here = sizes[at : at + PARTS_PER_LAYER]
        storage = torch.frombuffer(mmap.mmap(-1, NUM_PAGES * sum(here)), dtype=torch.int8)
        parts = storage.split([NUM_PAGES * size for size in here])
        made += [part.view(NUM_PAGES, size) for part, size in zip(parts, here, strict=True)]
    return made


class Far(Rank):
    """Rank over a fake, with tensors in its memory. before: called with the fake first."""

    def __init__(
        self,
        name: str,
        folder: Path,
        sizes: Sequence[int] = GQA,
        n: int = 1,
        direct: Direct = Direct.ON,
        verify: Verify = Verify.OFF,
        before: Callable[[StorageFake], None] = lambda fake: None,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        stream: list[int] = []
        self.fake, device, self._undo = on_fake(name, lambda: stream[0])
        before(self.fake)
        stream.append(self.fake.compute_stream())
        self.stream = stream[0]
        self.far = device
        tensors = layers(sizes)
        storages = [tensor.untyped_storage() for tensor in tensors[::PARTS_PER_LAYER]]
        for storage in storages:
            self.fake.adopt(storage.data_ptr(), storage.nbytes())
            self._undo.callback(self.fake.disown, storage.data_ptr())
        self.num_allocations = len(storages)
        kind = KINDS[self.fake.vendor]
        try:
            super().__init__(
                folder, sizes, n, direct, device, verify=verify, tensors=tensors,
                theirs=lambda tensor: on_device(kind, tensor), groups=groups,
            )  # fmt: skip
        except BaseException:
            device.close()
            self._undo.close()
            raise

    def num_calls(self, name: str) -> int:
        return self.fake.count(PREFIXES[self.fake.vendor] + name)

    def compute(self, value: int) -> None:
        """Queue compute that sets every byte at some time."""
        for tensor in self.tensors[::PARTS_PER_LAYER]:
            storage = tensor.untyped_storage()
            self.fake.fill(storage.data_ptr(), storage.nbytes(), value, self.stream)

    def close(self) -> None:
        super().close()
        self._undo.close()


def saw_nothing(fake: StorageFake) -> None:
    assert fake.violations == []
    assert fake.storage_leaks == []
    assert fake.leaks == []


@contextmanager
def far_rank(name: str, folder: Path, *args: object, **named: object) -> Iterator[Far]:
    made = Far(name, folder, *args, **named)  # type: ignore[arg-type]
    try:
        made.fill(_random(made, 1))
        yield made
    finally:
        made.close()
    saw_nothing(made.fake)


@pytest.fixture(params=LIBRARIES)
def rank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Far]:
    with far_rank(request.param, tmp_path) as made:
        yield made


@pytest.mark.parametrize("sizes", [GQA, MLA], ids=["GQA", "MLA"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_direct_read_brings_what_host_memory_brings(
    name: str, sizes: tuple[int, ...], n: int, tmp_path: Path
) -> None:
    with far_rank(name, tmp_path, sizes, n, Direct.ON, Verify.SAMPLED) as rank:
        check_blocks(rank)
        assert rank.fake.num_transfers > 0


@pytest.mark.parametrize("groups", [LIKE_GROUPS, SMALL_GROUP], ids=["alike", "a small one"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_blocks_of_several_groups_come_directly(
    name: str, groups: list[range], tmp_path: Path
) -> None:
    with far_rank(name, tmp_path, n=2, groups=groups) as rank:
        check_groups(rank)
        assert rank.fake.num_transfers > 0


def test_every_layers_memory_is_registered_once_and_no_block_passes_host_memory(
    rank: Far,
) -> None:
    assert rank.num_allocations == 2
    rank.store(3, [0, 1, 2])
    right = rank.pages()
    copies = rank.fake.count("copies")
    for to in ([3, 4, 5], [7, 6, 9]):
        rank.load([0, 1, 2], [0, 1, 2], to)
        np.testing.assert_array_equal(rank.pages()[to], right[:3])
    assert rank.fake.count("copies") == copies
    assert rank.num_calls("BufRegister") == (0 if rank.fake.vendor == "ascend" else 2)


@pytest.mark.parametrize("heeds", [True, False], ids=["with fences", "without"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_read_waits_for_those_who_use_its_pages_still(
    name: str, heeds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the control without the wait, the fakes have to notice the race."""
    rank = Far(name, tmp_path)
    rank.fill(right := _random(rank, 1))
    rank.store(3, [0, 1, 2])
    if not heeds:

        def drop() -> Fence:
            return Passed()

        monkeypatch.setattr(rank.far, "fence", drop)
    rank.fake.hold()
    rank.compute(7)
    read = order(2, Verb.READ, range(3), NAMES[:3])
    target = GPULoadStoreSpec([3, 4, 5], [3], [0])
    assert rank.worker.submit_load(9, in_slots([], range(3), read), target)
    if heeds:
        for _ in range(20):
            rank.worker.rest()
            assert rank.worker.get_finished() == []
        assert rank.fake.num_transfers == 0
    else:
        rank.worker.wait({9})
    rank.fake.release()
    rank.worker.wait({9})
    assert [each.job_id for each in rank.worker.get_finished()] == [9]
    rank.fake.wait_for(rank.stream)
    assert np.array_equal(rank.pages()[3:6], right[:3]) == heeds
    assert (rank.fake.violations == []) == heeds
    rank.close()
    assert rank.fake.storage_leaks == []


def test_load_is_done_when_the_driver_has_answered(rank: Far) -> None:
    """Until then the driver may write to these pages, so vLLM must not reuse them."""
    rank.store(2, [0, 1])
    rank.fake.hold_storage()
    read = order(2, Verb.READ, [1], NAMES[1:2])
    assert rank.worker.submit_load(9, in_slots([0], [1], read), TO_PAGES)
    for _ in range(60_000):
        if rank.fake.num_moving:
            break
        rank.worker.rest()
    for _ in range(20):
        rank.worker.rest()
        assert rank.worker.get_finished() == []
    rank.fake.let_storage_go()
    rank.worker.wait({9})
    assert [each.job_id for each in rank.worker.get_finished()] == [9]
    assert np.array_equal(rank.pages()[3:5], rank.pages()[:2])


@pytest.mark.parametrize(
    ("fault", "value"),
    [(Fault.ERROR, errno.EIO), (Fault.ERROR, 5014), (Fault.CUT, 0), (Fault.CUT, 100)],
)
def test_what_the_library_fails_at_is_read_by_way_of_host_memory(
    rank: Far, fault: Fault, value: int
) -> None:
    rank.store(3, [0, 1, 2])
    right = rank.pages()[:3]
    rank.fake.fail_transfer(fault, value)
    done = rank.load([0, 1, 2], [0, 1, 2], [3, 4, 5])
    assert done is not None
    assert not done.failed
    assert rank.worker.take_failed_loads() == []
    np.testing.assert_array_equal(rank.pages()[3:6], right)


@pytest.mark.parametrize("name", LIBRARIES)
def test_load_with_a_flipped_bit_fails_and_its_block_is_gone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged block that is verified, here the first of a sample, is dropped."""
    monkeypatch.setattr(LocalMover, "scrub", lambda self: [])  # it might find the block before
    with far_rank(name, tmp_path, GQA, 1, Direct.ON, Verify.SAMPLED) as rank:
        check_damaged(rank, tmp_path, 0)


@pytest.mark.parametrize("name", LIBRARIES)
def test_where_every_block_is_verified_on_is_refused_and_auto_is_off(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="verify: always, and the device computes no checksums"):
        Far(name, tmp_path / "on", verify=Verify.ALWAYS)
    for verify, direct in ((Verify.ALWAYS, frozenset()), (Verify.OFF, {DISK})):
        folder = tmp_path / verify.value
        with far_rank(name, folder, GQA, 1, Direct.AUTO, verify) as rank:
            assert rank.worker.take_report(frozenset()).hellos[0].direct == direct


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("name", [name for name in LIBRARIES if name != "nds"])
def test_a_refused_registration_is_told_and_leaves_nothing_behind(
    name: str, nth: int, tmp_path: Path
) -> None:
    """A refusal of any layer's memory is reported, and nothing is left behind."""
    fakes: list[StorageFake] = []

    def refuse(fake: StorageFake) -> None:
        fakes.append(fake)
        fake.fail_call(f"{PREFIXES[fake.vendor]}BufRegister", 5036, nth)

    with pytest.raises(ConfigError, match="direct: on, and .*can't be pinned.*leave it at auto"):
        Far(name, tmp_path, before=refuse)
    saw_nothing(fakes[0])


# -- with the scheduler's half ---------------------------------------------------------------------


@pytest.mark.parametrize("direct", ["on", "auto"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_settings_of_vllm_bring_blocks_directly_from_disk(
    name: str, direct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings of ``kv_connector_extra_config`` lead to bytes in the pages of two ranks.

    Each rank has an allocation. With ``auto``, reads go through host memory, which has room.
    """
    fake, device, undo = on_fake(name)
    device.close()  # each rank has its own
    kind = KINDS[fake.vendor]

    class Accelerated(Replica):
        @staticmethod
        def make_tensor(page_bytes: int) -> torch.Tensor:
            memory = mmap.mmap(-1, REPLICAS_PAGES * page_bytes)
            made = torch.frombuffer(memory, dtype=torch.int8)
            fake.adopt(made.data_ptr(), made.nbytes)
            undo.callback(fake.disown, made.data_ptr())
            return made.view(REPLICAS_PAGES, page_bytes)

        @staticmethod
        def theirs(tensor: torch.Tensor) -> torch.Tensor:
            return on_device(kind, tensor)

        def _copy(self, number_of_pages: int, slots: object, is_load: bool) -> None:
            super()._copy(number_of_pages, slots, is_load)
            self.step()  # the report of it is not behind that

    monkeypatch.setattr(halves, "find_device", lambda name: make_device(fake))
    disk: Any = {
        "disk_path": str(tmp_path),
        "disk_capacity": 256 * PAGE_BYTES,
        "disk_verify": "off",
    }
    with undo:
        made = Accelerated(
            "", disk_direct=direct, host_capacity=8 * PAGE_BYTES, eviction_policy="lru", **disk
        )
        undo.callback(made.close)
        made.compute(1, 2, 3)
        made.settle()
        for other in range(11, 15):  # in each rank host memory has room for these
            made.compute(other)
            made.settle()
        before = fake.num_transfers
        assert made.load(1, 2, 3) == 3, "and it compares their bytes"
        assert (fake.num_transfers > before) == (direct == "on")
    saw_nothing(fake)
