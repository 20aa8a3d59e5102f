"""Copies made from slots, and the threads that run them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cache.transfer import Job, Lane, TransferEngine, stage
from kvtier.cache.transfer.staging import MAX_COPIES, coalesce, split
from kvtier.core.errors import Closed, DeviceError
from kvtier.core.types import BlockKey, BlockName, BlockNames, Slot, keys_of
from kvtier.devices import CopyBatch, Direction, Fence
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import ORDERS, DType, full_attention, named_layout, repack
from kvtier.testing import FaultyDevice, host_memory, memory_bytes
from kvtier.tiers import MemoryTier

GROUP = full_attention(2, 2, 4, DType.FLOAT16, 2)
SIZE = 400


class Plain(MemoryTier):
    """Slots in plain memory."""

    def __init__(self, layout: str, num_blocks: int) -> None:
        made = named_layout(layout, GROUP, num_blocks)
        super().__init__("plain", host_memory(made.nbytes), made)

    def close(self) -> None:
        """Release nothing."""


@st.composite
def batches(draw: st.DrawFn) -> CopyBatch:
    """Generate copies between two memories: runs of neighbours, gaps, and empty ones."""
    src, dst = host_memory(SIZE), host_memory(SIZE)
    memory_bytes(src)[:] = np.random.default_rng(0).integers(1, 256, SIZE, np.uint8)
    at = to = 0
    rows = []
    for _ in range(draw(st.integers(0, 20))):
        size = draw(st.integers(0, 9))
        at += draw(st.sampled_from([0, 0, 0, 1, 5]))
        to += draw(st.sampled_from([0, 0, 0, 1, 5]))
        rows.append((at, to, size))
        at, to = at + size, to + size
    rows = draw(st.permutations(rows)) if draw(st.booleans()) else rows
    table = np.array(rows, np.int64).reshape(-1, 3)
    return CopyBatch(src, dst, table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())


def _moved(*pieces: CopyBatch) -> bytes:
    """Return the content of the destination after plain copies, starting from zeros."""
    after = np.zeros(SIZE, np.uint8)
    for batch in pieces:
        src = memory_bytes(batch.src)
        for at, to, size in zip(batch.src_offset, batch.dst_offset, batch.size, strict=True):
            after[to : to + size] = src[at : at + size]
    return after.tobytes()


# -- batching --------------------------------------------------------------------------------------


@given(batches())
def test_merged_copies_move_the_same_bytes(batch: CopyBatch) -> None:
    merged = coalesce(batch)
    assert _moved(merged) == _moved(batch)
    assert merged.num_bytes == batch.num_bytes
    assert (merged.size > 0).all()
    follows = (merged.src_offset[:-1] + merged.size[:-1] == merged.src_offset[1:]) & (
        merged.dst_offset[:-1] + merged.size[:-1] == merged.dst_offset[1:]
    )
    assert not follows.any(), "neighbours that were not merged"


@given(batches(), st.integers(1, 7))
def test_split_copies_move_the_same_bytes(batch: CopyBatch, max_copies: int) -> None:
    pieces = list(split(batch, max_copies))
    assert all(0 < len(piece.size) <= max_copies for piece in pieces)
    assert sum(len(piece.size) for piece in pieces) == len(batch.size)
    assert _moved(*pieces) == _moved(batch)


def test_nothing_is_split_into_nothing() -> None:
    nothing = np.zeros(0, np.int64)
    assert list(split(CopyBatch(host_memory(1), host_memory(1), nothing, nothing, nothing))) == []


@pytest.mark.parametrize("src_layout", sorted(ORDERS))
@pytest.mark.parametrize("dst_layout", sorted(ORDERS))
def test_staged_copies_move_whole_blocks(src_layout: str, dst_layout: str) -> None:
    src, dst = Plain(src_layout, 7), Plain(dst_layout, 6)
    rng = np.random.default_rng(3)
    memory_bytes(src.memory)[:] = rng.integers(0, 256, src.memory.nbytes, np.uint8)
    memory_bytes(dst.memory)[:] = rng.integers(0, 256, dst.memory.nbytes, np.uint8)
    expected = memory_bytes(dst.memory).copy()
    src_slots, dst_slots = [6, 0, 1, 2], [3, 1, 2, 5]
    repack(memory_bytes(src.memory), src.layout, src_slots, expected, dst.layout, dst_slots)
    batch = stage(src, [Slot(s) for s in src_slots], dst, [Slot(s) for s in dst_slots])
    assert batch.num_bytes == 4 * GROUP.bytes_per_block
    CpuDevice().copy(batch, Direction.LOAD)
    np.testing.assert_array_equal(memory_bytes(dst.memory), expected)


def test_neighbouring_blocks_are_one_copy() -> None:
    src, dst = Plain("block_first", 8), Plain("block_first", 8)
    batch = stage(src, [Slot(2), Slot(3), Slot(4)], dst, [Slot(5), Slot(6), Slot(7)])
    assert batch.size.tolist() == [3 * GROUP.bytes_per_block]


def test_staging_no_blocks_copies_nothing() -> None:
    assert stage(Plain("block_first", 2), [], Plain("layer_first", 2), []).num_bytes == 0


# -- the engine ------------------------------------------------------------------------------------


class GatedFence(Fence):
    """A fence over compute work that ends when the test opens ``gate``."""

    def __init__(self) -> None:
        self.gate = Event()

    @property
    def passed(self) -> bool:
        return self.gate.is_set()

    def wait(self) -> None:
        self.gate.wait()

    def hold_compute(self) -> None:
        raise AssertionError("nothing computes here")


class FencedDevice(FaultyDevice):
    """A device that returns ``next_fence``, and raises if that is None."""

    def __init__(self) -> None:
        super().__init__(CpuDevice(threads=1))
        self.next_fence: Fence | None = super().fence()

    def fence(self) -> Fence:
        if self.next_fence is None:
            raise DeviceError("the test wants no fence")
        return self.next_fence


@pytest.fixture
def device() -> FencedDevice:
    return FencedDevice()


@pytest.fixture
def engine(device: FencedDevice) -> Iterator[TransferEngine]:
    engine = TransferEngine(device)
    yield engine
    device.release()
    engine.close()


def _batch(value: int = 1, num_copies: int = 2) -> CopyBatch:
    src, dst = host_memory(num_copies), host_memory(num_copies)
    memory_bytes(src)[:] = value
    offset = np.arange(num_copies, dtype=np.int64)
    return CopyBatch(src, dst, offset, offset, np.ones(num_copies, np.int64))


def _arrived(batch: CopyBatch) -> bool:
    return bool((memory_bytes(batch.dst) == memory_bytes(batch.src)).all())


def test_compute_follows_a_load_step_by_step(engine: TransferEngine, device: FencedDevice) -> None:
    steps = [_batch(1), _batch(2), _batch(3)]
    device.hold(Direction.LOAD)
    job = engine.submit(steps, Direction.LOAD)
    device.release()
    for step, batch in enumerate(steps):
        job.hold_compute(step)
        assert _arrived(batch)
    assert job.wait(60)


def test_compute_is_not_held_for_a_step_that_will_not_come(
    engine: TransferEngine, device: FencedDevice
) -> None:
    device.fail(Direction.LOAD, nth=2)
    job = engine.submit([_batch(1), _batch(2)], Direction.LOAD)
    with pytest.raises(DeviceError, match=r"step 1 .* the test wants this load to fail"):
        job.hold_compute(1)
    assert job.wait(60)
    with pytest.raises(DeviceError, match="did not arrive"):
        job.hold_compute(0)


@pytest.mark.parametrize("direction", Direction)
def test_bytes_have_arrived_when_the_job_is_done(
    engine: TransferEngine, direction: Direction
) -> None:
    batch = _batch()
    job = engine.submit([batch], direction)
    assert job.wait(60)
    assert job.succeeded
    assert job.error is None
    assert _arrived(batch)


def test_copy_waits_for_the_compute_work_before_it(
    engine: TransferEngine, device: FencedDevice
) -> None:
    device.next_fence = fence = GatedFence()
    late = _batch()
    job = engine.submit([late], Direction.LOAD)
    device.next_fence = GatedFence()
    device.next_fence.gate.set()
    other = engine.submit([_batch()], Direction.STORE)
    assert other.wait(60), "the other direction does not wait for it"
    assert not job.done
    assert not _arrived(late)
    fence.gate.set()
    assert job.wait(60)
    assert _arrived(late)


def test_one_direction_runs_in_order(engine: TransferEngine, device: FencedDevice) -> None:
    device.hold(Direction.LOAD)
    batches = [_batch(value) for value in range(1, 6)]
    target = batches[0].dst
    same_target = [CopyBatch(b.src, target, b.src_offset, b.dst_offset, b.size) for b in batches]
    jobs = [engine.submit([batch], Direction.LOAD) for batch in same_target]
    assert not any(job.done for job in jobs)
    device.release()
    assert all(job.wait(60) for job in jobs)
    assert set(memory_bytes(target).tolist()) == {5}


def test_failed_copy_is_reported_not_raised(engine: TransferEngine, device: FencedDevice) -> None:
    device.fail(Direction.LOAD)
    job = engine.submit([_batch()], Direction.LOAD)
    assert job.wait(60)
    assert not job.succeeded
    assert isinstance(job.error, DeviceError)
    after = engine.submit([_batch()], Direction.LOAD)
    assert after.wait(60)
    assert after.succeeded


def test_crash_of_a_device_is_reported_with_its_cause(
    engine: TransferEngine, device: FencedDevice
) -> None:
    device.crash(Direction.STORE)
    job = engine.submit([_batch()], Direction.STORE)
    assert job.wait(60)
    assert isinstance(job.error, DeviceError)
    assert isinstance(job.error.__cause__, ZeroDivisionError)
    assert engine.submit([_batch()], Direction.STORE).wait(60), "the worker is still there"


def test_device_without_a_fence_fails_the_job(engine: TransferEngine, device: FencedDevice) -> None:
    device.next_fence = None
    job = engine.submit([_batch()], Direction.LOAD)
    assert job.wait(60)
    assert isinstance(job.error, DeviceError)
    assert engine.queued_bytes(Direction.LOAD) == 0


def test_large_batch_goes_in_pieces(engine: TransferEngine, device: FencedDevice) -> None:
    batch = _batch(num_copies=2 * MAX_COPIES + 1)
    assert engine.submit([batch], Direction.LOAD).wait(60)
    assert _arrived(batch)
    assert device.num_copies[Direction.LOAD] == 3


def test_failure_in_a_later_piece_fails_the_job(
    engine: TransferEngine, device: FencedDevice
) -> None:
    device.fail(Direction.LOAD, nth=2)
    job = engine.submit([_batch(num_copies=2 * MAX_COPIES + 1)], Direction.LOAD)
    assert job.wait(60)
    assert not job.succeeded
    assert device.num_copies[Direction.LOAD] == 2, "the rest is not copied"


def test_bytes_in_line_are_counted_per_direction(
    engine: TransferEngine, device: FencedDevice
) -> None:
    device.hold(Direction.LOAD)
    jobs = [engine.submit([_batch()], Direction.LOAD) for _ in range(3)]
    assert engine.queued_bytes(Direction.LOAD) == 6
    assert engine.queued_bytes(Direction.STORE) == 0
    assert not jobs[0].wait(0), "a time-out is False, and the job goes on"
    device.release()
    assert all(job.wait(60) for job in jobs)
    assert engine.queued_bytes(Direction.LOAD) == 0


def test_close_finishes_all_and_refuses_more(device: FencedDevice) -> None:
    engine = TransferEngine(device)
    batches = [_batch() for _ in range(20)]
    jobs = [
        engine.submit([batch], list(Direction)[index % 2]) for index, batch in enumerate(batches)
    ]
    engine.close()
    assert all(job.done for job in jobs)
    assert all(map(_arrived, batches))
    engine.close()
    with pytest.raises(Closed):
        engine.submit([_batch()], Direction.LOAD)


# -- lanes -----------------------------------------------------------------------------------------


class Order:
    """Work that records when it runs. The first item waits at a gate."""

    def __init__(self) -> None:
        self.lane = Lane("test", DeviceError)
        self.gate, self.began = Event(), Event()
        self.ran: list[str] = []
        self.lane.submit(self._wait, 1)
        assert self.began.wait(60)

    def _wait(self, job: Job) -> tuple[int, ...]:
        self.began.set()
        assert self.gate.wait(60)
        return ()

    def submit(self, name: str, urgent: bool) -> Job:
        def work(job: Job) -> tuple[int, ...]:
            self.ran.append(name)
            return ()

        return self.lane.submit(work, 10, urgent)

    def finish(self) -> list[str]:
        self.gate.set()
        assert self.lane.close(60)
        return self.ran


def test_urgent_jobs_pass_the_others() -> None:
    order = Order()
    jobs = [order.submit(name, urgent=name.isupper()) for name in "abCD"]
    order.gate.set()
    assert all(job.wait(60) for job in jobs)
    assert order.finish() == ["C", "D", "a", "b"]


def test_a_job_in_a_hurry_goes_to_the_end_of_the_urgent_line() -> None:
    order = Order()
    jobs = {name: order.submit(name, urgent=name.isupper()) for name in "abCd"}
    order.lane.hurry(jobs["b"])
    order.lane.hurry(jobs["b"])
    order.gate.set()
    assert all(job.wait(60) for job in jobs.values())
    assert order.finish() == ["C", "b", "a", "d"]


def test_only_what_is_not_urgent_can_be_withdrawn() -> None:
    order = Order()
    urgent, patient = order.submit("A", urgent=True), order.submit("b", urgent=False)
    assert not order.lane.withdraw(urgent)
    assert order.lane.withdraw(patient)
    assert not order.lane.withdraw(patient)
    assert patient.done
    assert patient.withdrawn
    assert not patient.succeeded
    assert order.finish() == ["A"]


def test_a_newcomer_waits_for_urgent_bytes_only() -> None:
    order = Order()
    assert order.lane.queued_bytes == 1, "what is running counts"
    order.submit("a", urgent=False)
    assert order.lane.queued_bytes == 1
    order.submit("B", urgent=True)
    assert order.lane.queued_bytes == 11
    assert not order.lane.is_idle
    assert order.lane.running_s > 0
    order.finish()
    assert order.lane.queued_bytes == 0
    assert order.lane.is_idle
    assert order.lane.running_s == 0


def test_the_end_does_not_wait_for_what_nobody_wants() -> None:
    order = Order()
    patient, urgent = order.submit("a", urgent=False), order.submit("B", urgent=True)
    end = Thread(target=order.lane.close, args=(60,))
    end.start()
    assert patient.wait(60), "while the first job is still running"
    assert patient.withdrawn
    assert not urgent.done
    assert order.finish() == ["B"]
    end.join(60)


def test_what_stands_in_line_when_the_time_is_over_never_runs() -> None:
    order = Order()
    urgent = order.submit("A", urgent=True)
    assert not order.lane.close(0), "the first job is still running"
    assert urgent.withdrawn
    assert not urgent.succeeded
    assert order.finish() == []


# -- callbacks -------------------------------------------------------------------------------------


def test_whoever_wants_to_know_is_told_once() -> None:
    """Callbacks run once, whether added before the end, during it, or afterwards."""
    for _ in range(200):
        job, told = Job(0), SimpleQueue[str]()
        job.when_done(partial(told.put, "early"))
        end = Thread(target=job.finish)
        end.start()
        job.when_done(partial(told.put, "meanwhile"))
        end.join(60)
        job.when_done(partial(told.put, "late"))
        assert sorted(told.get_nowait() for _ in range(told.qsize())) == sorted(
            ["early", "meanwhile", "late"]
        )


def test_names_of_many_blocks_are_as_good_as_a_list_of_names() -> None:
    names = [BlockName(b"n", at, BlockKey(bytes([at]) * 32)) for at in range(4)]
    many = BlockNames([b"n"] * 4, range(4), [name.key for name in names])
    assert many == names == list(many)
    assert many[1:3] == names[1:3]
    assert (many[0], many[-1], len(many)) == (names[0], names[3], 4)
    assert list(keys_of(many)) == list(keys_of(names))
    assert many != names[:3]
