"""Loads in steps: the bytes of each step, and computing behind the steps."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import numpy as np
import pytest

from kvtier.cache.transfer import CopyJob, LayerGate, stage, stage_steps
from kvtier.core.errors import DeviceError
from kvtier.core.types import Slot
from kvtier.devices import Direction, Fence
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import (
    ORDERS,
    DType,
    KVGroup,
    full_attention,
    latent_attention,
    named_layout,
    part_view,
    repack,
)
from kvtier.testing import host_memory, memory_bytes
from kvtier.tiers import MemoryTier
from tests.cache.tokens.harness import A, Harness

MakeHarness = Callable[..., Harness]
GROUPS = {
    "gqa": full_attention(5, 2, 4, DType.FLOAT16, 4),
    "mla": latent_attention(5, 12, 4, DType.FLOAT16, 4),
}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every layer a step."""
    monkeypatch.setattr("kvtier.cache.transfer.staging.STEP_BYTES", 1)


class Plain(MemoryTier):
    """Slots in plain memory, filled with noise."""

    def __init__(self, layout: str, group: KVGroup, seed: int) -> None:
        made = named_layout(layout, group, 8)
        super().__init__("plain", host_memory(made.nbytes), made)
        noise = np.random.default_rng(seed).integers(0, 256, made.nbytes, np.uint8)
        memory_bytes(self.memory)[:] = noise

    def close(self) -> None:
        """Release nothing."""


SLOTS = [Slot(at) for at in (6, 0, 1, 2)], [Slot(at) for at in (3, 4, 5, 0)]


# -- staging ---------------------------------------------------------------------------------------


def pairs() -> list[tuple[str, str, str]]:
    orders = {"gqa": list(ORDERS), "mla": ["layer_first", "part_first", "block_first"]}
    return [(kind, a, b) for kind, names in orders.items() for a in names for b in names]


@pytest.mark.parametrize(("kind", "src_name", "dst_name"), pairs())
@pytest.mark.parametrize("step_layers", [1, 2])
def test_each_step_brings_its_layers_and_nothing_else(
    kind: str, src_name: str, dst_name: str, step_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = GROUPS[kind]
    layer_bytes = len(SLOTS[0]) * group.bytes_per_block // group.num_layers
    monkeypatch.setattr("kvtier.cache.transfer.staging.STEP_BYTES", step_layers * layer_bytes)
    src, dst = Plain(src_name, group, 1), Plain(dst_name, group, 2)
    before = memory_bytes(dst.memory).copy()
    after = before.copy()
    repack(memory_bytes(src.memory), src.layout, SLOTS[0], after, dst.layout, SLOTS[1])
    steps = stage_steps(src, SLOTS[0], dst, SLOTS[1])
    assert sum(batch.num_bytes for batch in steps) == 4 * group.bytes_per_block
    for step, batch in enumerate(steps):
        assert batch.num_bytes == batch.size.sum()
        CpuDevice(threads=1).copy(batch, Direction.LOAD)
        end = (step + 1) * steps.layers_per_step
        for part in range(len(group.parts)):
            found = part_view(memory_bytes(dst.memory), dst.layout, part)
            for content, layers in ((after, slice(0, end)), (before, slice(end, None))):
                wanted = part_view(content, dst.layout, part)
                np.testing.assert_array_equal(found[:, layers], wanted[:, layers])
    np.testing.assert_array_equal(memory_bytes(dst.memory), after)


def test_a_host_block_goes_to_the_pool_layer_by_layer() -> None:
    host, pool = Plain("block_first", GROUPS["gqa"], 1), Plain("layer_first", GROUPS["gqa"], 2)
    steps = stage_steps(host, SLOTS[0], pool, SLOTS[1])
    assert steps.layers_per_step == 1
    assert [len(batch.size) for batch in steps] == [2 * 4] * 5


def test_blocks_in_one_piece_are_not_cut() -> None:
    src, dst = Plain("block_first", GROUPS["gqa"], 1), Plain("block_first", GROUPS["gqa"], 2)
    steps = stage_steps(src, SLOTS[0], dst, SLOTS[1])
    assert steps.layers_per_step == 5
    (batch,) = steps
    assert sorted(batch.size.tolist()) == sorted(stage(src, SLOTS[0], dst, SLOTS[1]).size.tolist())


def test_neighbours_within_a_layer_are_one_copy() -> None:
    src, dst = Plain("layer_first", GROUPS["gqa"], 1), Plain("layer_first", GROUPS["gqa"], 2)
    run = [Slot(2), Slot(3), Slot(4)]
    steps = stage_steps(src, run, dst, run)
    assert [len(batch.size) for batch in steps] == [2] * 5


def test_few_bytes_are_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.cache.transfer.staging.STEP_BYTES", 1 << 20)
    host, pool = Plain("block_first", GROUPS["gqa"], 1), Plain("layer_first", GROUPS["gqa"], 2)
    assert len(stage_steps(host, SLOTS[0], pool, SLOTS[1])) == 1


# -- the layer gate --------------------------------------------------------------------------------


class CountingFence(Fence):
    """A fence that counts how often compute was held for it."""

    def __init__(self) -> None:
        self.num_holds = 0

    @property
    def passed(self) -> bool:
        return False

    def wait(self) -> None:
        Event().wait()

    def hold_compute(self) -> None:
        self.num_holds += 1


def test_a_layer_waits_for_the_step_that_brings_it() -> None:
    job, fences = CopyJob(1, 3, 2), [CountingFence() for _ in range(3)]
    for fence in fences:
        job.submitted(fence)
    gate = LayerGate([job])
    for layer in (0, 1, 5):
        gate.hold_compute(layer)
    assert [fence.num_holds for fence in fences] == [2, 0, 1]


def test_a_gate_waits_for_a_load_that_hangs_as_long_as_it_may() -> None:
    gate = LayerGate([CopyJob(1, 3, 1)], patience_s=0.01)
    with pytest.raises(DeviceError, match="not queued within"):
        gate.hold_compute(0)
    with pytest.raises(DeviceError, match="longer"):
        gate.wait()


# -- the cache -------------------------------------------------------------------------------------


def test_a_load_from_the_host_can_be_followed(harness: Harness) -> None:
    harness.put_on_host([*A, 9])
    request = harness.ask([*A, 9])
    gate = harness.cache.follow(request.lease)
    assert gate is not None
    harness.device.release()
    for layer in range(2):
        gate.hold_compute(layer)
    gate.wait()
    assert not request.lease.ready, "nobody has looked"
    harness.cache.poll()
    assert request.lease.ready
    harness.finish(request)


def test_a_load_that_another_request_began_is_followed_too(harness: Harness) -> None:
    harness.put_on_host([*A, 9])
    first, second = harness.ask([*A, 9]), harness.ask([*A, 9])
    gate = harness.cache.follow(second.lease)
    assert gate is not None
    harness.device.release()
    gate.wait()
    harness.cache.poll()
    for request in (first, second):
        harness.finish(request)
    assert harness.device.num_copies[Direction.LOAD] == 2, "one load, a step per layer"


def test_what_is_there_needs_no_gate(harness: Harness) -> None:
    harness.serve([*A, 9])
    assert harness.cache.follow(harness.start([*A, 9]).lease) is None


def test_what_comes_from_storage_first_can_not_be_followed(make_harness: MakeHarness) -> None:
    harness = make_harness(disk_blocks=20)
    harness.serve([*A, 9])
    assert harness.cache.drain()
    harness.cache.clear("device")
    harness.cache.clear("host")
    assert harness.storage is not None
    harness.storage.open_reads.clear()
    request = harness.ask([*A, 9])
    assert not request.lease.ready
    assert harness.cache.follow(request.lease) is None
    harness.open_storage()


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("fault", ["fail", "fail_half_way", "crash"])
def test_a_step_that_fails_ends_the_gate_and_breaks_the_lease(
    harness: Harness, step: int, fault: str
) -> None:
    harness.put_on_host([*A, 9])
    request = harness.ask([*A, 9])
    gate = harness.cache.follow(request.lease)
    assert gate is not None
    getattr(harness.device, fault)(Direction.LOAD, nth=step)
    harness.device.release()
    with pytest.raises(DeviceError):
        gate.hold_compute(step - 1)
    harness.cache.poll()
    assert request.lease.ready
    assert request.lease.broken
    harness.release(request)
    harness.check()
    harness.finish(harness.start([*A, 9]))
