"""Blocks are read from a disk directly into an engine's pages on an accelerator.

Each layer is an allocation, or several layers are one. The bytes that arrive are the same as
through host memory, and no others change.

Every test also fails if a fake saw a call that hardware might punish, or a resource that was not
released.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.connectors.common.paged_pool import GroupPages, PagedPool, PoolShare
from kvtier.core.errors import ConfigError
from kvtier.core.types import BlockKey, BlockName, Direct, Slot, Verify
from kvtier.devices import Direction, Memory
from kvtier.layout import opaque
from kvtier.testing import host_memory, memory_bytes
from kvtier.tiers import Outcome, Pieces
from kvtier.tiers.disk import DiskOptions, DiskTier
from tests.kit.fakes.storage import LIBRARIES
from tests.tiers.disk.accelerated import KINDS, line_of, on_fake

PAGE = 4096
NUM_PAGES = 9
NUM_BLOCKS = 5
NAMES = [BlockName(b"n" * 32, at, BlockKey(b"%032d" % at)) for at in range(NUM_BLOCKS)]
KEYS = [each.key for each in NAMES]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

GQA = [4 * PAGE] * 6
MLA = [8 * PAGE, PAGE] * 3
LAYOUTS = {
    "GQA: an allocation a layer": (GQA, [2, 2, 2]),
    "GQA: K and V apart": (GQA, [1] * 6),
    "GQA: one for several layers": (GQA, [4, 2]),
    "MLA: an allocation a layer": (MLA, [2, 2, 2]),
    "MLA: one for all": (MLA, [6]),
}
"""Bytes of a page in each tensor, and how many tensors lie in each allocation."""


class Tensors:
    """Tensors [NUM_PAGES, padded share] in allocations of an accelerator, and blocks on a disk.

    behind: bytes from the beginning of an allocation to its first tensor. between: from the end of
    each tensor to the next.
    """

    def __init__(
        self,
        name: str,
        sizes: Sequence[int],
        num_tensors: Sequence[int],
        n: int = 1,
        pad: int = 0,
        behind: int = 0,
        between: int = 0,
    ) -> None:
        self.fake, self.device, self._undo = on_fake(name)
        self.n = n
        kind = KINDS[self.fake.vendor]
        self.shares: list[PoolShare] = []
        self.allocations: list[Memory] = []
        left = list(sizes)
        for num in num_tensors:
            here, left = left[:num], left[num:]
            num_bytes = behind + sum(NUM_PAGES * (size + pad) + between for size in here)
            at = self.fake.allocate(num_bytes)
            self._undo.callback(self.fake.free, at)
            self.allocations.append(Memory(at, num_bytes, kind, None))
            at += behind
            for size in here:
                self.shares.append(PoolShare(at, size + pad, size))
                at += NUM_PAGES * (size + pad) + between
        self.slot_bytes = sum(sizes) * n
        self.pool = PagedPool(
            [self.shares], NUM_PAGES, n, self.slot_bytes, kind, None, self.allocations
        )
        self._undo.callback(self.device.close)
        self.disks: list[DiskTier] = []

    def disk(self, folder: Path, **options: Any) -> DiskTier:
        made = DiskOptions(
            folder, 8 * self.slot_bytes, **{"direct": Direct.ON, "verify": Verify.OFF, **options}
        )
        arena = host_memory(self.slot_bytes)
        disk = DiskTier(
            made, opaque(self.slot_bytes), arena, pool=self.pool.direct_pool(self.device)
        )
        self.disks.append(disk)
        return disk

    def read(self) -> list[Bytes]:
        return [
            self.fake.peek(allocation.address, allocation.nbytes) for allocation in self.allocations
        ]

    def fill(self, content: Sequence[Bytes]) -> None:
        for allocation, part in zip(self.allocations, content, strict=True):
            self.fake.poke(allocation.address, part)

    def random(self, seed: int) -> list[Bytes]:
        random = np.random.default_rng(seed)
        return [
            random.integers(0, 256, allocation.nbytes, np.uint8) for allocation in self.allocations
        ]

    def close(self) -> None:
        for disk in self.disks:
            disk.close()
        self._undo.close()


@contextmanager
def tensors_on(name: str, *args: object, **named: object) -> Iterator[Tensors]:
    made = Tensors(name, *args, **named)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()
    assert made.fake.violations == []
    assert made.fake.storage_leaks == []
    assert made.fake.leaks == []


def store(disk: DiskTier, seed: int) -> Memory:
    """Store blocks of random bytes on the disk; return them as they are in host memory's slots."""
    host = host_memory(NUM_BLOCKS * disk.bytes_per_block)
    memory_bytes(host)[:] = np.random.default_rng(seed).integers(0, 256, host.nbytes, np.uint8)
    addresses = host.address + np.arange(NUM_BLOCKS) * disk.bytes_per_block
    assert (
        disk.put(NAMES, Pieces.whole(addresses, disk.bytes_per_block), 60)
        == [Outcome.THERE] * NUM_BLOCKS
    )
    return host


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
@settings(max_examples=max(10, settings().max_examples // 3))
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    n=st.integers(1, 3),
    pad=st.sampled_from([0, PAGE]),
    behind=st.sampled_from([0, PAGE]),
    between=st.sampled_from([0, 512]),
    verify=st.sampled_from([Verify.OFF, Verify.SAMPLED]),
    percent_short=st.sampled_from([0, 40]),
    first=st.integers(0, 2),
    num_pages=st.integers(1, 7),
    seed=st.integers(0, 2**32 - 1),
)
def test_directly_or_by_host_memory_the_bytes_are_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    layout: str,
    n: int,
    pad: int,
    behind: int,
    between: int,
    verify: Verify,
    percent_short: int,
    first: int,
    num_pages: int,
    seed: int,
) -> None:
    """Some pages of a block may be unwanted: no byte of these is touched."""
    first %= n
    num_blocks = min(NUM_BLOCKS, -(-(first + num_pages) // n))
    num_pages = min(num_pages, num_blocks * n - first)
    pages = np.random.default_rng(seed).permutation(NUM_PAGES)[:num_pages].tolist()
    group = GroupPages(pages, [Slot(at) for at in range(num_blocks)], first)
    if LAYOUTS[layout][1] != [1] * 6:
        between = 0  # tensors of one allocation begin at pages
    with tensors_on(name, *LAYOUTS[layout], n, pad, behind, between) as tensors:
        tensors.fake.reset_storage(seed, 20 * (seed % 3), percent_short)
        disk = tensors.disk(tmp_path_factory.mktemp("slab"), verify=verify, sample_every=2)
        host = store(disk, seed)
        before = tensors.random(seed)
        tensors.fill(before)
        tensors.device.copy(tensors.pool.stage([group], host, Direction.LOAD), Direction.LOAD)
        expected = tensors.read()
        tensors.fill(before)
        blocks = tensors.pool.pieces([group.by_block(n)])
        assert disk.get(KEYS[:num_blocks], blocks, 60) == [Outcome.THERE] * num_blocks
        found = tensors.read()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert any(not np.array_equal(*each) for each in zip(before, expected, strict=True))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("name", LIBRARIES)
def test_whole_blocks_pass_no_host_memory(name: str, layout: str, tmp_path: Path) -> None:
    """Only the wanted pieces of a partial block are copied."""
    sizes, num_tensors = LAYOUTS[layout]
    with tensors_on(name, sizes, num_tensors, 2) as tensors:
        disk = tensors.disk(tmp_path)
        assert disk.facts.direct is Direct.ON
        store(disk, 1)
        assert (
            disk.get(KEYS[:3], tensors.pool.pieces([np.array([[3, 8], [0, 1], [5, 4]])]), 60)
            == [Outcome.THERE] * 3
        )
        assert tensors.fake.num_transfers > 0
        assert tensors.fake.count("copies") == 0
        before = tensors.fake.num_transfers
        disk.get(KEYS[:1], tensors.pool.pieces([np.array([[-1, 8]])]), 60)
        assert tensors.fake.num_transfers == before
        assert tensors.fake.count("copies") == len(sizes)


@pytest.mark.parametrize("name", LIBRARIES)
def test_auto_is_short_of_nothing_but_room(name: str, tmp_path: Path) -> None:
    """As on a CPU, reads go through host memory, and directly while that is full."""
    with tensors_on(name, *LAYOUTS["GQA: an allocation a layer"]) as tensors:
        disk = tensors.disk(tmp_path, direct=Direct.AUTO)
        assert disk.facts.direct is Direct.AUTO
        line = line_of(disk, "disk to device")
        assert (line.found, line.note) == (
            "through host memory",
            "direct while host memory is full",
        )


@pytest.mark.parametrize(
    ("named", "options", "reason"),
    [
        ({}, {"verify": Verify.ALWAYS}, "verify: always, and the device computes no checksums"),
        ({"behind": 512}, {}, "a piece begins 512 bytes after a page boundary"),
        ({"pad": 1024}, {}, "a piece begins 1024 bytes after a page boundary"),
    ],
    ids=["always", "behind a page", "padded"],
)
@pytest.mark.parametrize("name", LIBRARIES)
def test_on_is_refused_in_a_sentence(
    name: str, named: dict[str, int], options: dict[str, object], reason: str, tmp_path: Path
) -> None:
    with tensors_on(name, *LAYOUTS["GQA: an allocation a layer"], **named) as tensors:
        with pytest.raises(ConfigError, match=reason):
            tensors.disk(tmp_path, **options)
        disk = tensors.disk(tmp_path, **{**options, "direct": Direct.AUTO})
        assert disk.facts.direct is Direct.OFF
        assert tensors.fake.storage_leaks == [], "nothing is registered for nothing"
