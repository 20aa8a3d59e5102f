"""Blocks are read from a disk directly into an engine's pages.

The bytes that arrive are the same as through host memory, and no others change.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.connectors.common.paged_pool import GroupPages, PagedPool, PoolShare
from kvtier.core.errors import ConfigError
from kvtier.core.types import BlockKey, BlockName, Direct, Slot, Verify
from kvtier.devices import Direction, Memory
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import opaque
from kvtier.testing import host_memory, memory_bytes
from kvtier.tiers import Outcome, Pieces
from kvtier.tiers.disk import DiskOptions, DiskTier

PAGE = 4096
NUM_PAGES = 9
NAMES = [BlockName(b"n" * 32, at, BlockKey(b"%032d" % at)) for at in range(5)]
LAYOUTS = {
    "K and V of three layers": [4 * PAGE] * 6,
    "one tensor": [3 * PAGE],
    "MLA: latent and rotary part": [8 * PAGE, PAGE] * 3,
    "layers of two kinds": [2 * PAGE, 4 * PAGE, 2 * PAGE],
}


class Tensors:
    """Tensors [NUM_PAGES, padded share] in one memory, with gaps between them.

    behind: offset of the first tensor from the beginning of a page, in bytes.
    """

    def __init__(self, sizes: Sequence[int], n: int, pad: int = 0, behind: int = 0) -> None:
        strides = [size + pad for size in sizes]
        self.owner = mmap.mmap(-1, PAGE + sum(NUM_PAGES * stride + PAGE for stride in strides))
        self.bytes = np.frombuffer(self.owner, np.uint8)
        shares, at = [], self.bytes.ctypes.data + behind
        for size, stride in zip(sizes, strides, strict=True):
            shares.append(PoolShare(at, stride, size))
            at += NUM_PAGES * stride + PAGE
        self.slot_bytes = -(-sum(sizes) * n // PAGE) * PAGE
        self.pool = PagedPool([shares], NUM_PAGES, n, self.slot_bytes, "cpu", self.owner)

    def disk(self, folder: Path, direct: Direct, verify: Verify = Verify.ALWAYS) -> DiskTier:
        options = DiskOptions(folder, 8 * self.slot_bytes, direct=direct, verify=verify)
        device = CpuDevice(threads=1)
        return DiskTier(options, opaque(self.slot_bytes), pool=self.pool.direct_pool(device))


def store(disk: DiskTier, num_blocks: int, seed: int) -> Memory:
    """Store blocks of random bytes on the disk; return them as they are in host memory's slots."""
    host = host_memory(num_blocks * disk.bytes_per_block)
    memory_bytes(host)[:] = np.random.default_rng(seed).integers(0, 256, host.nbytes, np.uint8)
    addresses = host.address + np.arange(num_blocks) * disk.bytes_per_block
    blocks = Pieces.whole(addresses, disk.bytes_per_block)
    assert disk.put(NAMES[:num_blocks], blocks) == [Outcome.THERE] * num_blocks
    return host


@given(
    sizes=st.sampled_from(list(LAYOUTS.values())),
    n=st.integers(1, 3),
    pad=st.sampled_from([0, PAGE]),
    first=st.integers(0, 2),
    num_pages=st.integers(1, 7),
    verify=st.sampled_from(Verify),
    seed=st.integers(0, 2**32 - 1),
)
def test_directly_or_by_host_memory_the_bytes_are_the_same(
    sizes: list[int], n: int, pad: int, first: int, num_pages: int, verify: Verify, seed: int
) -> None:
    tensors, random = Tensors(sizes, n, pad), np.random.default_rng(seed)
    first %= n
    num_blocks = min(len(NAMES), -(-(first + num_pages) // n))
    num_pages = min(num_pages, num_blocks * n - first)
    pages = random.permutation(NUM_PAGES)[:num_pages].tolist()
    group = GroupPages(pages, [Slot(at) for at in range(num_blocks)], first)
    before = random.integers(0, 256, len(tensors.bytes), np.uint8)
    tensors.bytes[:] = before
    with tempfile.TemporaryDirectory() as folder:
        disk = tensors.disk(Path(folder), Direct.ON, verify)
        host = store(disk, num_blocks, seed)
        CpuDevice(threads=1).copy(tensors.pool.stage([group], host, Direction.LOAD), Direction.LOAD)
        expected = tensors.bytes.copy()
        tensors.bytes[:] = before
        blocks = tensors.pool.pieces([group.by_block(n)])
        found = disk.get([each.key for each in NAMES[:num_blocks]], blocks)
        disk.close()
    assert found == [Outcome.THERE] * num_blocks
    np.testing.assert_array_equal(tensors.bytes, expected)
    assert not np.array_equal(expected, before)


@given(
    n=st.integers(1, 4),
    first=st.integers(0, 3),
    num_pages=st.integers(1, 12),
    cuts=st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_runs_of_blocks_have_the_pages_of_all(
    n: int, first: int, num_pages: int, cuts: tuple[int, int]
) -> None:
    first %= n
    num_blocks = -(-(first + num_pages) // n)
    group = GroupPages(range(num_pages), [Slot(at) for at in range(num_blocks)], first)
    low, high = sorted(min(cut, num_blocks) for cut in cuts)
    runs = [(0, low), (low, high), (high, num_blocks)]
    parts = [group.blocks(*run, n) for run in runs if run[0] < run[1]]
    found = np.concatenate([part.by_block(n) for part in parts])
    np.testing.assert_array_equal(found, group.by_block(n))
    assert [slot for part in parts for slot in part.slots] == group.slots


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (Tensors([3 * PAGE], 1, behind=64), "begins 64 bytes after a page boundary"),
        (Tensors([3 * PAGE], 1, pad=512), "begins 512 bytes after a page boundary"),
        (Tensors([PAGE, 768], 1), "a piece of 768 bytes is not a multiple of 4096"),
        (Tensors([PAGE] * 4, 1), "pieces of 4096 bytes are faster to copy"),
    ],
    ids=["behind a page", "padded", "odd", "small"],
)
def test_what_can_not_come_directly_is_said_and_refused(
    tensors: Tensors, reason: str, tmp_path: Path
) -> None:
    disk = tensors.disk(tmp_path / "auto", Direct.AUTO)
    assert disk.facts.direct is Direct.OFF
    assert any(reason in finding.note for finding in disk.findings())
    disk.close()
    with pytest.raises(ConfigError, match=reason):
        tensors.disk(tmp_path / "on", Direct.ON)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ([[4 * PAGE] * 3, [4 * PAGE] * 3], ""),
        ([[4 * PAGE], [4 * PAGE] * 3], ""),
        (
            [[4 * PAGE] * 2, [8 * PAGE]],
            "the pieces of a page are of 32768 bytes in KV group 1, and of 16384 in another",
        ),
    ],
    ids=["alike", "a small one", "others"],
)
def test_groups_whose_blocks_are_in_other_pieces_are_told(
    sizes: list[list[int]], reason: str
) -> None:
    groups = [[PoolShare(4 * PAGE, 4 * PAGE, size) for size in group] for group in sizes]
    assert PagedPool(groups, 2, 1, 12 * PAGE, "cpu", None).why_not_direct == reason


@pytest.mark.parametrize("verify", Verify)
def test_flipped_bit_is_found_where_nobody_has_verified_it(verify: Verify, tmp_path: Path) -> None:
    """After a crash the content of a slab is unverified: each block is verified when it is read."""
    tensors = Tensors(LAYOUTS["K and V of three layers"], 1)
    before = tensors.disk(tmp_path, Direct.ON, verify)
    first = memory_bytes(store(before, 2, seed=1))[:256].tobytes()
    before.abandon()
    with (tmp_path / "data.slab").open("r+b") as file:
        at = file.read().index(first) + tensors.slot_bytes - 5
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    disk = tensors.disk(tmp_path, Direct.ON, verify)
    keys = [each.key for each in NAMES[:2]]
    assert disk.get(keys, tensors.pool.pieces([np.array([[3], [5]])])) == [
        Outcome.DAMAGED,
        Outcome.THERE,
    ]
    assert disk.find(keys) == [Outcome.ABSENT, Outcome.THERE]
    disk.close()
