"""Stores and loads of random blocks between random layouts, in the order that a fake likes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cache.transfer import CopyJob, TransferEngine, stage, stage_steps
from kvtier.core.types import Slot
from kvtier.devices import Device, Direction, Memory
from kvtier.devices.cpu import CpuDevice
from kvtier.devices.paths import BATCH_VARIABLE
from kvtier.layout import (
    DType,
    KVGroup,
    full_attention,
    latent_attention,
    named_layout,
    repack,
)
from kvtier.testing import host_memory, memory_bytes
from kvtier.tiers import DeviceTier, HostTier
from tests.devices.drivers import host_compute, make_device
from tests.kit.fakes.fake import VARIANTS, Fake

Bytes = npt.NDArray[np.uint8]
NUM_DEVICE, NUM_HOST = 7, 9

GROUPS = st.one_of(
    st.builds(
        full_attention,
        num_layers=st.integers(1, 5),
        num_kv_heads=st.integers(1, 3),
        head_dim=st.sampled_from([4, 6, 16]),
        dtype=st.sampled_from([DType.BFLOAT16, DType.FLOAT32, DType.UINT8]),
        block_size=st.integers(1, 4),
    ),
    st.builds(
        latent_attention,
        num_layers=st.integers(1, 5),
        kv_lora_rank=st.sampled_from([8, 24]),
        rope_dim=st.sampled_from([2, 8]),
        dtype=st.just(DType.BFLOAT16),
        block_size=st.integers(1, 4),
    ),
)
POOLS = st.sampled_from(["layer_first", "part_first", "block_first", "page_first_kv_split"])


@dataclass(frozen=True)
class Move:
    """Blocks that are copied: which way, and which slots."""

    direction: Direction
    at_device: tuple[int, ...]
    at_host: tuple[int, ...]


@st.composite
def moves(draw: st.DrawFn) -> Move:
    count = draw(st.integers(1, 5))
    return Move(
        draw(st.sampled_from(list(Direction))),
        tuple(draw(st.permutations(range(NUM_DEVICE)))[:count]),
        tuple(draw(st.permutations(range(NUM_HOST)))[:count]),
    )


@dataclass
class Bench:
    """A device with a pool and a host tier, both with random content, and what they should hold."""

    device: Device
    pool: DeviceTier
    host: HostTier
    engine: TransferEngine
    expected_pool: Bytes
    expected_host: Bytes
    running: list[tuple[Move, CopyJob]] = field(default_factory=list)

    def move(self, move: Move, in_steps: bool) -> None:
        """Begin, once nothing else is under way in the same slots."""
        for other, job in list(self.running):
            if set(other.at_device) & set(move.at_device) or set(other.at_host) & set(move.at_host):
                assert job.wait(60)
                assert job.error is None
                self.running.remove((other, job))
        at_device = [Slot(slot) for slot in move.at_device]
        at_host = [Slot(slot) for slot in move.at_host]
        if move.direction is Direction.LOAD:
            args: Any = (self.host, at_host, self.pool, at_device)
            steps = stage_steps(*args) if in_steps else (stage(*args),)
            src: Any = (self.expected_host, self.host)
            dst: Any = (self.expected_pool, self.pool)
        else:
            args = (self.pool, at_device, self.host, at_host)
            steps = (stage(*args),)
            src, dst = (self.expected_pool, self.pool), (self.expected_host, self.host)
        repack(src[0], src[1].layout, args[1], dst[0], dst[1].layout, args[3])
        self.running.append((move, self.engine.submit(steps, move.direction)))

    def finish(self) -> None:
        for _, job in self.running:
            assert job.wait(60)
            assert job.error is None
        self.engine.close()


def pool_bytes(group: KVGroup) -> int:
    return NUM_DEVICE * group.bytes_per_block


def _bench(group: KVGroup, layout: str, device: Device, pool: Memory) -> Bench:
    rng = np.random.default_rng(1)
    host = HostTier(group, NUM_HOST * group.bytes_per_block, device)
    sizes = (pool_bytes(group), NUM_HOST * group.bytes_per_block)
    in_pool, in_host = (rng.integers(0, 256, size, np.uint8) for size in sizes)
    memory_bytes(host.memory)[: len(in_host)] = in_host
    tier = DeviceTier(pool, named_layout(layout, group, NUM_DEVICE))
    return Bench(device, tier, host, TransferEngine(device), in_pool, in_host)


@pytest.mark.parametrize("switch", ["auto", "off"])
@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=max(5, settings.default.max_examples // 8))
@given(
    group=GROUPS,
    layout=POOLS,
    planned=st.lists(moves(), min_size=1, max_size=8),
    in_steps=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_every_byte_goes_where_it_should_and_no_other_is_touched(
    variant: str, switch: str, group: KVGroup, layout: str, planned: list[Move], in_steps: bool,
    seed: int,
) -> None:  # fmt: skip
    fake = Fake(variant)
    fake.reset(seed, late_reads=seed % 2 == 1, max_delay_us=40 * (seed % 3))
    stream = fake.compute_stream()
    compute = host_compute if seed % 5 == 0 else (lambda: stream)
    device = make_device(fake, 0, compute, {BATCH_VARIABLE: switch})
    nbytes = pool_bytes(group)
    bench = _bench(group, layout, device, Memory(fake.allocate(nbytes), nbytes, "fake", None))
    fake.poke(bench.pool.memory.address, bench.expected_pool)
    for move in planned:
        bench.move(move, in_steps)
    bench.finish()
    np.testing.assert_array_equal(fake.peek(bench.pool.memory.address, nbytes), bench.expected_pool)
    host = memory_bytes(bench.host.memory)[: len(bench.expected_host)]
    np.testing.assert_array_equal(host, bench.expected_host)
    bench.host.close()
    bench.running.clear()
    device.close()
    fake.free(bench.pool.memory.address)
    assert fake.count("synchronous_copies") == 0, "host memory is page-locked"
    assert fake.violations == []
    assert fake.leaks == []


@settings(max_examples=max(10, settings.default.max_examples // 2))
@given(
    group=GROUPS,
    layout=POOLS,
    planned=st.lists(moves(), min_size=1, max_size=8),
    in_steps=st.booleans(),
)
def test_the_cpu_does_the_same(
    group: KVGroup, layout: str, planned: list[Move], in_steps: bool
) -> None:
    pool = host_memory(pool_bytes(group))
    bench = _bench(group, layout, CpuDevice(threads=1), pool)
    memory_bytes(pool)[:] = bench.expected_pool
    for move in planned:
        bench.move(move, in_steps)
    bench.finish()
    np.testing.assert_array_equal(memory_bytes(pool), bench.expected_pool)
    host = memory_bytes(bench.host.memory)[: len(bench.expected_host)]
    np.testing.assert_array_equal(host, bench.expected_host)
    bench.host.close()
