"""Chunks between an engine's tensors and slots: every byte where it should be, and merged."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.connectors.vllm.pages import ChunkPart, Page, PagedPool
from kvtier.connectors.vllm.settings import Settings
from kvtier.devices import Direction
from kvtier.devices.cpu import CpuDevice
from kvtier.errors import ConfigError
from kvtier.testing import host_memory, memory_bytes
from kvtier.types import Slot

Bytes = npt.NDArray[np.uint8]
NUM_BLOCKS, NUM_SLOTS = 9, 5


class Tensors:
    """Groups of tensors [NUM_BLOCKS, padded page] in one memory, with gaps."""

    def __init__(self, sizes: list[list[int]], pads: int, blocks_per_chunk: int) -> None:
        rng = np.random.default_rng(3)
        self.per_chunk = blocks_per_chunk
        self.stride = max(max(group) for group in sizes) + pads
        count = sum(len(group) for group in sizes)
        self.memory = rng.integers(0, 256, count * (NUM_BLOCKS * self.stride + 8), np.uint8)
        self.groups: list[list[Page]] = []
        at = self.memory.ctypes.data
        for group in sizes:
            self.groups.append([])
            for size in group:
                self.groups[-1].append(Page(at, self.stride, size))
                at += NUM_BLOCKS * self.stride + 8
        self.slot_bytes = max(sum(group) for group in sizes) * blocks_per_chunk + 24
        self.pool = PagedPool(
            self.groups, NUM_BLOCKS, blocks_per_chunk, self.slot_bytes, "cpu", self.memory
        )

    def in_slot(self, host: Bytes, group: int, number: int, slot: int, within: int) -> Bytes:
        """Where a page of a block lies in host memory, by the formula in the docstring."""
        before = sum(page.nbytes for page in self.groups[group][:number])
        size = self.groups[group][number].nbytes
        at = slot * self.slot_bytes + before * self.per_chunk + within * size
        return host[at : at + size]


sizes = st.lists(
    st.lists(st.sampled_from([8, 24, 40]), min_size=1, max_size=3), min_size=1, max_size=2
)


@given(
    sizes=sizes,
    pads=st.sampled_from([0, 16]),
    blocks_per_chunk=st.integers(1, 3),
    first=st.integers(0, 2),
    counts=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    seed=st.integers(0, 99),
    direction=st.sampled_from(Direction),
)
def test_every_page_goes_where_the_formula_says(
    sizes: list[list[int]], pads: int, blocks_per_chunk: int, first: int, counts: list[int],
    seed: int, direction: Direction,
) -> None:  # fmt: skip
    tensors, rng = Tensors(sizes, pads, blocks_per_chunk), np.random.default_rng(seed)
    host = host_memory(NUM_SLOTS * 2 * tensors.slot_bytes)
    memory_bytes(host)[:] = rng.integers(0, 256, host.nbytes, np.uint8)
    parts, used = [], 0
    for count in counts[: len(sizes)]:
        begin = first % blocks_per_chunk if count else 0
        num_chunks = -(-(begin + count) // blocks_per_chunk)
        slots = [Slot(slot) for slot in range(used, used + num_chunks)][::-1]
        used += num_chunks
        blocks = rng.permutation(NUM_BLOCKS)[:count].tolist()
        parts.append(ChunkPart(blocks, slots, begin))
    before = memory_bytes(host).copy()
    device_before = tensors.memory.copy()
    batch = tensors.pool.stage(parts, host, direction)
    CpuDevice(threads=1).copy(batch, direction)
    after, num_bytes = memory_bytes(host), 0
    expected_host, expected_device = before.copy(), device_before.copy()
    for group, part in enumerate(parts):
        for place, block in enumerate(part.blocks, part.first):
            slot, within = part.slots[place // blocks_per_chunk], place % blocks_per_chunk
            for number, page in enumerate(tensors.groups[group]):
                at = page.address - tensors.memory.ctypes.data + block * page.stride
                held = tensors.in_slot(expected_host, group, number, slot, within)
                if direction is Direction.STORE:
                    held[:] = device_before[at : at + page.nbytes]
                else:
                    expected_device[at : at + page.nbytes] = held
                num_bytes += page.nbytes
    np.testing.assert_array_equal(after, expected_host)
    np.testing.assert_array_equal(tensors.memory, expected_device)
    assert batch.num_bytes == num_bytes


def test_neighbouring_blocks_are_one_copy_per_tensor() -> None:
    tensors = Tensors([[24, 24]], 0, blocks_per_chunk=4)
    part = ChunkPart([2, 3, 4, 5], [Slot(1)], 0)
    host = host_memory(NUM_SLOTS * tensors.slot_bytes)
    assert len(tensors.pool.stage([part], host, Direction.STORE).size) == 2


def test_settings_are_read_and_refused_by_name() -> None:
    assert Settings.read({"spec_name": "kvtier", "host": "2GiB"}).host_bytes == 2 << 30
    assert Settings.read({"blocks_per_chunk": 4}).host == "4GiB"
    for extra, told in (
        ({"hosts": "2GiB"}, "no setting is called 'hosts'; did you mean 'host'"),
        ({"host": "lots"}, "host: can't read 'lots' as a size"),
        ({"host": 2.5}, "host: 2.5 is no size"),
        ({"host": 0}, "host: 0 is no room"),
        ({"zzz": 1}, "known: disk, disk_bytes_per_day, disk_capacity, disk_durability, host"),
        ({"disk": "/nvme"}, "disk: '/nvme' with disk_capacity: 0; give both"),
        ({"disk_capacity": "1GiB"}, "disk: '' with disk_capacity: '1GiB'; give both"),
        ({"disk": 7, "disk_capacity": "1GiB"}, "disk: 7 is no text"),
        ({"load": "never"}, "load: 'never' is unknown; use one of auto, always"),
        ({"disk_durability": "some"}, "disk_durability: 'some' is unknown"),
    ):
        with pytest.raises(ConfigError, match=told):
            Settings.read(extra)
