"""Blocks between a slab and their memory: any layout, the same bytes, no leaks."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.errors import ConfigError
from kvtier.core.hot import crc32c
from kvtier.core.types import Direct, IoKind, Slot, Verify
from kvtier.devices.base import Memory
from kvtier.layout import DType, KVGroup, full_attention, named_layout, repack
from kvtier.layout.named import ORDERS
from kvtier.testing import host_memory, memory_bytes
from kvtier.tiers import DeviceTier, Outcome, Pieces
from kvtier.tiers.crc_join import joined_crcs
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.disk.bounce import BlockPort, Bounce
from kvtier.tiers.disk.direct import Pool, choose
from kvtier.tiers.disk.io import open_engine
from tests.tiers.disk.accelerated import (
    GQA,
    MLA,
    NUM_BLOCKS,
    ODD,
    PAGE,
    THERE,
    keys,
    line_of,
    names,
)
from tests.tiers.disk.faulty_disk import FaultyDisk

GROUPS = {"GQA": GQA, "MLA": MLA, "odd": ODD}


def pool_of(layout: str, group: KVGroup, shift: int = 0, num: int = NUM_BLOCKS) -> DeviceTier:
    """Return a zeroed pool that begins ``shift`` bytes behind a page."""
    arranged = named_layout(layout, group, num)
    whole = host_memory(arranged.nbytes + 2 * PAGE)
    skip = -whole.address % PAGE + shift
    part = memory_bytes(whole)[skip : skip + arranged.nbytes]
    return DeviceTier(Memory(part.ctypes.data, arranged.nbytes, "cpu", part), arranged)


def content_of(pool: DeviceTier) -> np.ndarray:
    return memory_bytes(pool.memory)


@contextmanager
def disk_of(
    folder: Path, group: KVGroup, pool: DeviceTier | None = None, **options: object
) -> Iterator[DiskTier]:
    slot_bytes = -(-group.bytes_per_block // PAGE) * PAGE
    made = replace(DiskOptions(folder, NUM_BLOCKS * slot_bytes), **options)  # type: ignore[arg-type]
    tier = DiskTier(
        made,
        group,
        pool.memory if pool else None,
        pool=Pool.of(pool) if pool else None,
    )
    try:
        yield tier
        tier.check_invariants()
    finally:
        tier.close()


@settings(max_examples=40, deadline=None)
@given(
    group=st.sampled_from(sorted(GROUPS)),
    layouts=st.tuples(st.sampled_from(sorted(ORDERS)), st.sampled_from(sorted(ORDERS))),
    shifts=st.tuples(st.sampled_from([0, 0, 64]), st.sampled_from([0, 0, 64])),
    io=st.sampled_from(IoKind),
    verify=st.sampled_from(Verify),
    order=st.permutations(range(NUM_BLOCKS)),
    seed=st.integers(0, 9),
)
def test_blocks_come_as_repack_would_bring_them(
    tmp_path_factory: pytest.TempPathFactory,
    group: str,
    layouts: tuple[str, str],
    shifts: tuple[int, int],
    io: IoKind,
    verify: Verify,
    order: list[int],
    seed: int,
) -> None:
    """From any layout and place to any other; no other byte changes."""
    here = pool_of(layouts[0], GROUPS[group], shifts[0])
    there = pool_of(layouts[1], GROUPS[group], shifts[1], NUM_BLOCKS + 2)
    for number, pool in enumerate((here, there)):
        rng = np.random.default_rng([seed, number])
        content_of(pool)[:] = rng.integers(0, 256, pool.memory.nbytes, np.uint8)
    expected = content_of(there).copy()
    repack(content_of(here), here.layout, range(NUM_BLOCKS), expected, there.layout, order)
    folder = tmp_path_factory.mktemp("slab")
    with disk_of(folder, GROUPS[group], there, io=io, verify=verify) as disk:
        slots = [Slot(at) for at in range(NUM_BLOCKS)]
        assert disk.put(names(), here.pieces(slots), 60) == THERE
        assert disk.get(keys(), there.pieces([Slot(at) for at in order]), 60) == THERE
    assert np.array_equal(content_of(there), expected)


@pytest.mark.parametrize("group", [GQA, MLA])
@pytest.mark.parametrize("io", [IoKind.URING, IoKind.PREADV])
def test_whole_pages_need_no_buffer(
    tmp_path: Path, group: KVGroup, io: IoKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    for way in ("copy_in", "copy_out"):
        monkeypatch.delattr(Bounce, way)
    pool = pool_of("layer_first", group)
    content_of(pool)[:] = np.random.default_rng(1).integers(0, 256, pool.memory.nbytes, np.uint8)
    expected = content_of(pool).copy()
    pieces = pool.pieces([Slot(at) for at in range(NUM_BLOCKS)])
    with disk_of(tmp_path, group, pool, io=io, direct=Direct.ON) as disk:
        assert disk.put(names(), pieces, 60) == THERE
        content_of(pool)[:] = 0
        assert disk.get(keys(), pieces, 60) == THERE
        assert line_of(disk, "disk to device").found == "direct"
    assert np.array_equal(content_of(pool), expected)


def test_several_disks_have_their_parts_of_each_layer(tmp_path: Path) -> None:
    pool = pool_of("layer_first", GQA)
    content_of(pool)[:] = np.random.default_rng(1).integers(0, 256, pool.memory.nbytes, np.uint8)
    expected = content_of(pool).copy()
    pieces = pool.pieces([Slot(at) for at in range(NUM_BLOCKS)])
    two = {"more_paths": (tmp_path / "two",), "direct": Direct.ON}
    with disk_of(tmp_path / "one", GQA, pool, **two) as disk:
        assert disk.put(names(), pieces, 60) == THERE
        content_of(pool)[:] = 0
        assert disk.get(keys(), pieces, 60) == THERE
    assert np.array_equal(content_of(pool), expected)


# -- on, auto and off ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "reason"),
    [
        (pool_of("layer_first", ODD), "a piece of 768 bytes is not a multiple of 4096"),
        (pool_of("layer_first", GQA, shift=64), "64 bytes after a page boundary"),
        (pool_of("page_first", GQA), "a piece of 256 bytes is not a multiple of 4096"),
    ],
    ids=["small pieces", "no page", "layers side by side"],
)
def test_on_is_refused_where_it_can_not_be_and_auto_says_why(
    tmp_path: Path, pool: DeviceTier, reason: str
) -> None:
    group = pool.layout.group
    with pytest.raises(ConfigError, match=reason), disk_of(tmp_path, group, pool, direct=Direct.ON):
        pass
    with disk_of(tmp_path, group, pool) as disk:
        assert line_of(disk, "disk to device").found == "through a buffer"
        assert reason in line_of(disk, "disk to device").note
        assert disk.facts.direct is Direct.OFF


def test_on_is_refused_where_nobody_says_what_is_reached(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="memory pool is unknown"),
        disk_of(tmp_path, GQA, direct=Direct.ON),
    ):
        pass


def test_off_reaches_host_memory_only(tmp_path: Path) -> None:
    pool = pool_of("layer_first", GQA)
    with disk_of(tmp_path, GQA, pool, direct=Direct.OFF) as disk:
        assert disk.facts.reaches == {"host"}
        assert line_of(disk, "disk to device").found == "through host memory"


# -- verification ----------------------------------------------------------------------------------


@given(
    trusted=st.lists(st.booleans(), max_size=40),
    verify=st.sampled_from(Verify),
    num_before=st.integers(0, 100),
    every=st.integers(1, 9),
)
def test_what_is_not_trusted_is_verified_and_a_sample_of_the_rest(
    trusted: list[bool], verify: Verify, num_before: int, every: int
) -> None:
    checked = choose(np.array(trusted, bool), verify, num_before, every).tolist()
    for at, is_trusted in enumerate(trusted):
        is_sample = verify is Verify.SAMPLED and (num_before + at) % every == 0
        assert checked[at] == (not is_trusted or verify is Verify.ALWAYS or is_sample)


def test_blocks_that_may_not_go_straight_take_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They arrive in the same place, with the same checksum."""
    pool = pool_of("layer_first", GQA)
    content = np.random.default_rng(1).integers(0, 256, pool.memory.nbytes, np.uint8)
    content_of(pool)[:] = content
    bounced: list[int] = []
    copy_out = Bounce.copy_out

    def note(self: Bounce, blocks: Pieces, places: np.ndarray, accelerator: None) -> None:
        bounced.append(len(blocks))
        copy_out(self, blocks, places, accelerator)

    monkeypatch.setattr(Bounce, "copy_out", note)
    size = GQA.bytes_per_block
    path = tmp_path / "file"
    path.write_bytes(bytes(NUM_BLOCKS * size))
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    port = BlockPort(open_engine(fd), Bounce(2, size), size)
    slots = np.arange(NUM_BLOCKS)
    pieces = pool.pieces([Slot(at) for at in range(NUM_BLOCKS)])
    done, crcs = port.write(slots, pieces, np.inf)
    assert done.tolist() == [size] * NUM_BLOCKS
    content_of(pool)[:] = 0
    direct = np.array([True, False, True, False, False, True])
    done, found = port.read(slots, pieces, np.ones(NUM_BLOCKS, bool), np.inf, direct)
    assert done.tolist() == [size] * NUM_BLOCKS
    assert found.tolist() == crcs.tolist()
    assert np.array_equal(content_of(pool), content)
    assert sum(bounced) == 3
    port.engine.close()
    os.close(fd)


@pytest.mark.parametrize("io", [IoKind.URING, IoKind.PREADV])
def test_a_wrong_byte_in_any_layer_is_noticed(tmp_path: Path, io: IoKind) -> None:
    pool = pool_of("layer_first", MLA)
    content_of(pool)[:] = np.random.default_rng(1).integers(0, 256, pool.memory.nbytes, np.uint8)
    pieces = pool.pieces([Slot(at) for at in range(NUM_BLOCKS)])
    with disk_of(tmp_path, MLA, pool, io=io, direct=Direct.ON) as disk:
        assert disk.put(names(), pieces, 60) == THERE
        ends = np.cumsum(pieces.sizes)
        with (tmp_path / "data.slab").open("r+b") as file:
            for at, end in enumerate(ends.tolist()):
                file.seek(at * MLA.bytes_per_block + end - 1)
                (byte,) = file.read(1)
                file.seek(at * MLA.bytes_per_block + end - 1)
                file.write(bytes([byte ^ 1]))
        assert disk.get(keys(), pieces, 60) == [Outcome.DAMAGED] * NUM_BLOCKS


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    num_blocks=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_checksum_of_pieces_is_that_of_the_whole(
    sizes: list[int], num_blocks: int, seed: int
) -> None:
    content = np.random.default_rng(seed).integers(0, 256, (num_blocks, sum(sizes)), np.uint8)
    ends = np.cumsum(sizes)

    def crc(block: np.ndarray) -> int:
        return crc32c(block.ctypes.data, len(block))

    of_pieces = np.array(
        [
            [crc(block[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
            for block in content
        ],
        np.uint32,
    )
    found = joined_crcs(of_pieces, np.array(sizes, np.int64))
    assert found.tolist() == [crc(block) for block in content]


# -- nothing is left behind ------------------------------------------------------------------------


def held() -> tuple[int, int, int]:
    """Return the numbers of descriptors, threads and mappings of this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps.count("io_uring")


@pytest.mark.slow
def test_ten_thousand_operations_leave_nothing_behind(tmp_path: Path) -> None:
    """Some operations fail: errors, short reads, damage, and no time left."""
    small = full_attention(2, 1, 64, DType.FLOAT16, 64)
    pool = pool_of("layer_first", small)
    pieces = pool.pieces([Slot(at) for at in range(NUM_BLOCKS)])
    before = held()
    for turn, io in enumerate((IoKind.URING, IoKind.PREADV, IoKind.URING)):
        system = FaultyDisk()
        options = DiskOptions(
            tmp_path / f"slab{turn}",
            NUM_BLOCKS * small.bytes_per_block,
            io=io,
            direct=Direct.ON,
            errors_until_off=1000,
        )
        tier = DiskTier(options, small, pool.memory, system, pool=Pool.of(pool))
        assert tier.put(names(), pieces, 60) == THERE
        opened = held()
        for each in range(560):
            if each % 7 == 1:
                system.fail("read", nth=2, code=errno.EAGAIN)
            elif each % 7 == 3:
                system.flip("read")
            elif each % 7 == 5:
                tier.get(keys(), pieces, 0.0)
            outcomes = tier.get(keys(), pieces, 60)
            lost = [at for at, outcome in enumerate(outcomes) if outcome is not Outcome.THERE]
            assert len(lost) <= 1
            stored = tier.put([names()[at] for at in lost], pieces.pick(lost), 60)
            assert stored == [Outcome.THERE] * len(lost)
        assert held()[0] == opened[0]
        tier.check_invariants()
        tier.close()
    after = held()
    assert after == before, "descriptors, threads, rings"


def test_opening_that_fails_half_way_gives_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of("layer_first", GQA)
    before = held()
    with (
        pytest.raises(ConfigError),
        disk_of(tmp_path / "one", ODD, pool_of("layer_first", ODD), direct=Direct.ON),
    ):
        pass

    def fail(*arguments: object) -> None:
        raise MemoryError("the test wants it")

    monkeypatch.setattr("kvtier.tiers.disk.part.BlockPort", fail)
    with pytest.raises(MemoryError), disk_of(tmp_path / "two", GQA, pool, direct=Direct.ON):
        pass
    assert held() == before
