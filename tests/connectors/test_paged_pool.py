"""Copies of blocks between an engine's tensors and slots, byte by byte, with merged copies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.connectors.common.paged_pool import GroupPages, PagedPool, PoolShare
from kvtier.core.types import Slot
from kvtier.devices import Direction, Memory
from kvtier.devices.cpu import CpuDevice
from kvtier.testing import host_memory, memory_bytes

Bytes = npt.NDArray[np.uint8]
NUM_PAGES, NUM_SLOTS = 9, 5


class Tensors:
    """Groups of tensors [NUM_PAGES, padded share] in one memory, with gaps."""

    def __init__(self, sizes: list[list[int]], pads: int, pages_per_block: int) -> None:
        rng = np.random.default_rng(3)
        self.pages_per_block = pages_per_block
        self.stride = max(max(group) for group in sizes) + pads
        count = sum(len(group) for group in sizes)
        self.memory = rng.integers(0, 256, count * (NUM_PAGES * self.stride + 8), np.uint8)
        self.groups: list[list[PoolShare]] = []
        at = self.memory.ctypes.data
        for group in sizes:
            self.groups.append([])
            for size in group:
                self.groups[-1].append(PoolShare(at, self.stride, size))
                at += NUM_PAGES * self.stride + 8
        self.slot_bytes = max(sum(group) for group in sizes) * pages_per_block + 24
        self.pool = PagedPool(
            self.groups, NUM_PAGES, pages_per_block, self.slot_bytes, "cpu", self.memory
        )

    def in_slot(self, host: Bytes, group: int, number: int, slot: int, within: int) -> Bytes:
        """Return the location of a page's share in host memory, by the docstring's formula."""
        before = sum(share.nbytes for share in self.groups[group][:number])
        size = self.groups[group][number].nbytes
        at = slot * self.slot_bytes + before * self.pages_per_block + within * size
        return host[at : at + size]


sizes = st.lists(
    st.lists(st.sampled_from([8, 24, 40]), min_size=1, max_size=3), min_size=1, max_size=2
)


@given(
    sizes=sizes,
    pads=st.sampled_from([0, 16]),
    pages_per_block=st.integers(1, 3),
    first=st.integers(0, 2),
    counts=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    seed=st.integers(0, 99),
    direction=st.sampled_from(Direction),
)
def test_every_share_goes_where_the_formula_says(
    sizes: list[list[int]], pads: int, pages_per_block: int, first: int, counts: list[int],
    seed: int, direction: Direction,
) -> None:  # fmt: skip
    tensors, rng = Tensors(sizes, pads, pages_per_block), np.random.default_rng(seed)
    host = host_memory(NUM_SLOTS * 2 * tensors.slot_bytes)
    memory_bytes(host)[:] = rng.integers(0, 256, host.nbytes, np.uint8)
    groups, used = [], 0
    for count in counts[: len(sizes)]:
        begin = first % pages_per_block if count else 0
        num_blocks = -(-(begin + count) // pages_per_block)
        slots = [Slot(slot) for slot in range(used, used + num_blocks)][::-1]
        used += num_blocks
        pages = rng.permutation(NUM_PAGES)[:count].tolist()
        groups.append(GroupPages(pages, slots, begin))
    before = memory_bytes(host).copy()
    device_before = tensors.memory.copy()
    batch = tensors.pool.stage(groups, host, direction)
    CpuDevice(threads=1).copy(batch, direction)
    after, num_bytes = memory_bytes(host), 0
    expected_host, expected_device = before.copy(), device_before.copy()
    for group, part in enumerate(groups):
        for place, page in enumerate(part.pages, part.first):
            slot, within = part.slots[place // pages_per_block], place % pages_per_block
            for number, share in enumerate(tensors.groups[group]):
                at = share.address - tensors.memory.ctypes.data + page * share.stride
                held = tensors.in_slot(expected_host, group, number, slot, within)
                if direction is Direction.STORE:
                    held[:] = device_before[at : at + share.nbytes]
                else:
                    expected_device[at : at + share.nbytes] = held
                num_bytes += share.nbytes
    np.testing.assert_array_equal(after, expected_host)
    np.testing.assert_array_equal(tensors.memory, expected_device)
    assert batch.num_bytes == num_bytes


def test_neighbouring_pages_are_one_copy_per_tensor() -> None:
    tensors = Tensors([[24, 24]], 0, pages_per_block=4)
    group = GroupPages([2, 3, 4, 5], [Slot(1)], 0)
    host = host_memory(NUM_SLOTS * tensors.slot_bytes)
    assert len(tensors.pool.stage([group], host, Direction.STORE).size) == 2


@pytest.mark.parametrize("direction", Direction)
def test_no_copy_crosses_two_allocations_that_are_neighbours(direction: Direction) -> None:
    """A driver refuses such a copy: the last page of one tensor and the first page of the next."""
    size, n = 64, 2
    memory = np.zeros(2 * NUM_PAGES * size, np.uint8)
    begin, middle = memory.ctypes.data, memory.ctypes.data + NUM_PAGES * size
    shares = [PoolShare(at, size, size) for at in (begin, middle)]
    pool = PagedPool(
        [shares], NUM_PAGES, n, 4 * size, "cpu", memory,
        [Memory(at, NUM_PAGES * size, "cpu", memory) for at in (begin, middle)],
    )  # fmt: skip
    batch = pool.stage([GroupPages([0, NUM_PAGES - 1], [Slot(0)], 0)], host_memory(256), direction)
    is_load = direction is Direction.LOAD
    offsets = batch.dst_offset if is_load else batch.src_offset
    seam = NUM_PAGES * size
    assert batch.size.sum() == 4 * size
    assert not ((offsets < seam) & (offsets + batch.size > seam)).any()
