"""Direct transfers between storage and device memory: waits, fences, and what they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Lock

import numpy as np
import pytest

from kvtier.cache.transfer import LocalMover, Move
from kvtier.cache.transfer.ring import Ring
from kvtier.core.errors import ConfigError
from kvtier.core.types import DEVICE, DISK, HOST, BlockKey, BlockName, Direct, Slot
from kvtier.devices import Direction, Fence, Memory
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import DType, full_attention, named_layout
from kvtier.testing import MemoryStorage, StoredBlocks, host_memory, memory_bytes
from kvtier.tiers import DeviceTier, StorageFacts
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.disk.direct import Pool

from .harness import GROUP, A, B, C, Harness, Request, count, until

MakeHarness = Callable[..., Harness]
LONG = [*A, 9]
"""Four blocks that can be reused, and a token left to compute."""
ON, AUTO, OFF = (
    StorageFacts(finds_at_once=True, direct=each) for each in (Direct.ON, Direct.AUTO, Direct.OFF)
)
READ_ONLY = StorageFacts(finds_at_once=True, writes_from=frozenset({"elsewhere"}))


@pytest.fixture
def shelf(make_harness: MakeHarness) -> StoredBlocks:
    """Return storage in which an earlier process has left ``LONG``."""
    made = StoredBlocks()
    make_harness(disk_blocks=30, shelf=made).serve(LONG)
    return made.copy()


def storage_of(harness: Harness) -> MemoryStorage:
    assert harness.storage is not None
    return harness.storage


def hits(request: Request) -> dict[str, int]:
    return request.lease.record.hit_blocks


# -- beside a host tier ----------------------------------------------------------------------------


def test_what_goes_straight_leaves_host_memory_alone(
    make_harness: MakeHarness, shelf: StoredBlocks
) -> None:
    harness = make_harness(disk_blocks=30, shelf=shelf, storage_facts=ON)
    request = harness.start(LONG)
    assert hits(request) == {DISK: 4}
    assert harness.held(HOST) == 0
    harness.finish(request)


def test_what_is_read_ahead_goes_to_host_memory_all_the_same(
    make_harness: MakeHarness, shelf: StoredBlocks
) -> None:
    """Nothing on the device is held for a request that is still queued."""
    harness = make_harness(disk_blocks=30, shelf=shelf, storage_facts=ON)
    prefetch = harness.prefetch(LONG)
    assert prefetch is not None
    assert harness.cache.drain()
    assert harness.held(HOST) == 4
    request = harness.start(LONG)
    assert hits(request) == {HOST: 4}
    harness.end_prefetch(prefetch)
    harness.finish(request)


@pytest.mark.parametrize(("facts", "num_loaded"), [(AUTO, 4), (OFF, 2)], ids=["auto", "off"])
def test_what_host_memory_has_no_room_for_goes_straight(
    make_harness: MakeHarness, shelf: StoredBlocks, facts: StorageFacts, num_loaded: int
) -> None:
    harness = make_harness(disk_blocks=30, host_blocks=2, shelf=shelf, storage_facts=facts)
    request = harness.start(LONG)
    assert hits(request) == {DISK: num_loaded}
    assert harness.held(HOST) == 2
    harness.finish(request)


def test_a_straight_read_that_fails_is_computed(
    make_harness: MakeHarness, shelf: StoredBlocks
) -> None:
    harness = make_harness(disk_blocks=30, shelf=shelf, storage_facts=ON)
    storage_of(harness).spoiled.add(list(shelf.blocks)[1])
    request = harness.start(LONG)
    assert request.lease.broken
    harness.release(request)
    harness.cache.poll()
    again = harness.start(LONG)
    assert sum(hits(again).values()) < 4
    harness.finish(again)


# -- writes without a host tier --------------------------------------------------------------------


@pytest.mark.parametrize("facts", [OFF, READ_ONLY], ids=["as they lie", "by the ring"])
def test_storage_that_hangs_holds_no_more_of_the_device_than_a_ring_has(
    make_harness: MakeHarness, facts: StorageFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request waits. Blocks that the ring has no room for are not written."""
    monkeypatch.setattr("kvtier.cache.transfer.ring.RING_BYTES", 2 * GROUP.bytes_per_block)
    harness = make_harness(disk_blocks=30, host_blocks=0, device_blocks=24, storage_facts=facts)
    storage_of(harness).open_writes.clear()
    archive = harness.cache._ladder._write_queues._queues[DISK]
    for number in range(20):
        request = harness.ask([number + 10] * 9)
        assert request.lease.ready, "there is nothing to load"
        harness.compute(request, len(request.labels))
        harness.cache.commit(request.lease, len(request.labels))
        harness.release(request)
        harness.cache.poll()
        assert archive._num_moving <= 2
    assert count(harness.cache.metrics, "kvtier_unwritten_blocks_total", tier=DISK) > 0
    storage_of(harness).open_writes.set()
    until(harness, lambda: harness.held(DISK) >= 2)


def ring_of(harness: Harness) -> Ring:
    mover = harness.cache._ladder._mover
    assert isinstance(mover, LocalMover)
    assert mover._ring is not None
    return mover._ring


def is_empty(harness: Harness) -> None:
    until(harness, lambda: ring_of(harness).num_used == 0, polls=False)


def test_what_can_not_be_written_from_the_device_passes_a_ring(make_harness: MakeHarness) -> None:
    shelf = StoredBlocks()
    earlier = make_harness(disk_blocks=30, host_blocks=0, shelf=shelf, storage_facts=READ_ONLY)
    for prompt in (LONG, [*B, 9], [*C, 9]):
        earlier.serve(prompt)
    assert len(shelf.blocks) == 12
    is_empty(earlier)
    harness = make_harness(disk_blocks=30, host_blocks=0, shelf=shelf, storage_facts=READ_ONLY)
    request = harness.start(LONG)
    assert hits(request) == {DISK: 4}
    harness.finish(request)


@pytest.mark.parametrize("fault", ["fail", "fail_half_way", "crash"])
def test_a_copy_to_the_ring_that_fails_is_not_written(
    make_harness: MakeHarness, fault: str
) -> None:
    harness = make_harness(disk_blocks=30, host_blocks=0, storage_facts=READ_ONLY)
    getattr(harness.device, fault)(Direction.STORE)
    harness.serve(LONG)
    is_empty(harness)
    assert harness.held(DISK) == 2, "of two pieces one"
    harness.serve(LONG)
    assert harness.held(DISK) == 4, "its next use offers it again"


def test_a_full_ring_drops(make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two storages share the ring, and each would fill it."""
    monkeypatch.setattr("kvtier.cache.transfer.ring.RING_BYTES", 2 * GROUP.bytes_per_block)
    far = MemoryStorage(GROUP, 30, StoredBlocks(), "far", READ_ONLY)
    harness = make_harness(
        disk_blocks=30, host_blocks=0, storage_facts=READ_ONLY, more_storage=(far,)
    )
    storage_of(harness).open_writes.clear()
    request = harness.start(LONG)
    harness.compute(request, len(request.labels))
    harness.cache.commit(request.lease, len(request.labels))
    harness.release(request)
    until(harness, lambda: count_failed(harness, "far") > 0)
    storage_of(harness).open_writes.set()
    assert harness.cache.drain()
    is_empty(harness)


def count_failed(harness: Harness, tier: str) -> float:
    name = "kvtier_failed_copies_total"
    return count(harness.cache.metrics, name, src=DEVICE, dst=tier)


def test_where_the_device_can_be_written_from_there_is_no_ring(make_harness: MakeHarness) -> None:
    for settings in ({"host_blocks": 0}, {"storage_facts": READ_ONLY}):
        harness = make_harness(disk_blocks=30, **settings)
        mover = harness.cache._ladder._mover
        assert isinstance(mover, LocalMover)
        assert mover._ring is None


# -- fences ----------------------------------------------------------------------------------------


class StrictDevice(CpuDevice):
    """A device that computes as late as it may: when a fence is waited for."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self._lock = Lock()
        self._queued: list[Callable[[], None]] = []

    def compute(self, work: Callable[[], None]) -> None:
        self._queued.append(work)

    def catch_up(self) -> None:
        """Run all queued work."""
        with self._lock:
            for work in self._queued:
                work()
            self._queued.clear()

    def fence(self) -> Fence:
        return LateFence(self)


class LateFence(Fence):
    def __init__(self, device: StrictDevice) -> None:
        self._device = device

    @property
    def passed(self) -> bool:
        return not self._device._queued

    def wait(self) -> None:
        self._device.catch_up()

    def hold_compute(self) -> None:
        raise AssertionError("nothing computes behind a copy here")


BLOCKS = full_attention(2, 1, 64, DType.FLOAT16, 64)
"""Four pieces of 8 KiB."""
SLOTS = [Slot(at) for at in range(4)]
NAMES = [BlockName(b"n" * 32, at, BlockKey(b"%032d" % at)) for at in range(4)]


class Bench:
    """A pool, a disk with direct access to it, and a device that computes late."""

    def __init__(self, folder: Path, writes_from: frozenset[str] | None = None) -> None:
        layout = named_layout("layer_first", BLOCKS, len(SLOTS))
        whole = host_memory(layout.nbytes + 4096)
        begin = -whole.address % 4096
        self.bytes = memory_bytes(whole)[begin : begin + layout.nbytes]
        memory = Memory(self.bytes.ctypes.data, layout.nbytes, "cpu", self.bytes)
        self.pool = DeviceTier(memory, layout)
        options = DiskOptions(folder, len(SLOTS) * BLOCKS.bytes_per_block, direct=Direct.ON)
        self.disk = DiskTier(options, BLOCKS, memory, pool=Pool.of(self.pool))
        self.disk.facts = replace(self.disk.facts, writes_from=writes_from)
        self.device = StrictDevice()
        self.mover = LocalMover({DEVICE: self.pool, DISK: self.disk}, self.device)
        rng = np.random.default_rng(1)
        self.right = rng.integers(0, 256, layout.nbytes, np.uint8)

    def fill(self, content: np.ndarray | int) -> None:
        self.bytes[:] = content

    def move(self, src: str, dst: str) -> None:
        job = self.mover.begin(Move(src, dst, SLOTS, SLOTS, NAMES))
        assert job.wait(60)
        assert job.succeeded
        self.device.catch_up()

    def close(self) -> None:
        assert not self.mover.close(60)
        self.disk.close()


@pytest.fixture(params=[True, False], ids=["with fences", "without"])
def heeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether fences are waited for.

    Negative control: without the wait the bytes have to be wrong.
    """
    if not request.param:
        monkeypatch.setattr(LateFence, "wait", lambda self: None)
    return bool(request.param)


def test_a_read_waits_for_those_who_use_its_slots_still(tmp_path: Path, heeds: bool) -> None:
    bench = Bench(tmp_path)
    bench.fill(bench.right)
    bench.move(DEVICE, DISK)
    bench.fill(0)
    bench.device.compute(lambda: bench.fill(7))
    bench.move(DISK, DEVICE)
    assert np.array_equal(bench.bytes, bench.right) == heeds
    bench.close()


@pytest.mark.parametrize("writes_from", [None, frozenset({"elsewhere"})], ids=["direct", "ring"])
def test_a_write_waits_until_its_blocks_are_computed(
    tmp_path: Path, heeds: bool, writes_from: frozenset[str] | None
) -> None:
    bench = Bench(tmp_path, writes_from)
    bench.fill(7)
    bench.device.compute(lambda: bench.fill(bench.right))
    bench.move(DEVICE, DISK)
    bench.fill(0)
    bench.move(DISK, DEVICE)
    assert np.array_equal(bench.bytes, bench.right) == heeds
    bench.close()


def test_off_needs_host_memory(tmp_path: Path, make_harness: MakeHarness) -> None:
    from kvtier.cache.tokens import Cache

    harness = make_harness()
    config = replace(
        harness.cache.config, host_capacity=0, disk_path=str(tmp_path), disk_direct=Direct.OFF
    )
    with pytest.raises(ConfigError, match="disk_direct: off sends blocks through host memory"):
        Cache(config, harness.device, harness.pool)
    with pytest.raises(ConfigError, match="disk_direct can't be 'no'"):
        replace(config, disk_direct="no")  # type: ignore[arg-type]
