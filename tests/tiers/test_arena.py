"""The host tier's memory: its segments, and how it is touched, locked, opened and released."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Event

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cache.transfer.staging import stage
from kvtier.core.errors import ConfigError
from kvtier.core.types import Slot
from kvtier.devices import Device, Direction, Finding
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import DType, full_attention, named_layout
from kvtier.testing import MemoryTierSuite, host_memory, memory_bytes
from kvtier.tiers import ArenaOptions, DeviceTier, HostTier, HugePages, MemoryTier
from kvtier.tiers.memory import pages
from kvtier.tiers.memory.arena import MAX_SEGMENT_BYTES, Segment, cut_segments
from kvtier.tiers.memory.slots import SlotPool
from tests.cache.tokens.locking import PATIENCE_S, LockingDevice

PAGE = mmap.PAGESIZE
GROUP = full_attention(1, 1, 96, DType.FLOAT16, 8)
"""Blocks of 3 KiB: four of them end where a page does."""
STEPPED = ArenaOptions(at_once_bytes=0, first_bytes=1, segment_bytes=24 << 10, threads=2)
"""The first segment has four blocks, the others eight."""
SMALL_PAGES = replace(STEPPED, huge_pages=HugePages.OFF)
NUM_BLOCKS = 30
SEGMENTS = [4, 8, 8, 8, 2]


def make_tier(
    device: Device,
    options: ArenaOptions = STEPPED,
    touch: Callable[[int, int, int, Callable[[], bool]], bool] = pages.touch,
) -> HostTier:
    return HostTier(GROUP, NUM_BLOCKS * GROUP.bytes_per_block, device, options, touch)


class TestHostTierThatOpenedInSteps(MemoryTierSuite):
    def make_tier(self, num_slots: int) -> MemoryTier:
        tier = HostTier(GROUP, num_slots * GROUP.bytes_per_block, LockingDevice(), STEPPED)
        assert tier.arena.wait(PATIENCE_S)
        return tier

    def make_device(self) -> Device:
        return CpuDevice()


# -- segments --------------------------------------------------------------------------------------


@given(
    num_blocks=st.integers(1, 5000),
    bytes_per_block=st.one_of(st.integers(1, 10_000), st.integers(1, 500).map(lambda n: n * 512)),
    first_bytes=st.integers(1, 1 << 22),
    segment_bytes=st.integers(1, 1 << 24),
    page_bytes=st.sampled_from([4096, 16384, 65536]),
)
def test_every_slot_is_in_one_segment_and_segments_end_on_pages(
    num_blocks: int, bytes_per_block: int, first_bytes: int, segment_bytes: int, page_bytes: int
) -> None:
    segments = cut_segments(num_blocks, bytes_per_block, first_bytes, segment_bytes, page_bytes)
    smallest = int(np.lcm(page_bytes, bytes_per_block))
    block = 0
    for position, segment in enumerate(segments):
        assert segment.num_blocks > 0
        assert segment.offset == block * bytes_per_block, "a gap, or a slot in two segments"
        assert segment.offset % page_bytes == segment.num_bytes % page_bytes == 0
        assert segment.num_bytes >= segment.num_blocks * bytes_per_block
        limit = segment_bytes if position else min(first_bytes, segment_bytes)
        assert segment.num_blocks * bytes_per_block <= max(limit, smallest)
        block += segment.num_blocks
        if segment is not segments[-1]:
            assert segment.num_bytes == segment.num_blocks * bytes_per_block
    assert block == num_blocks
    assert (
        0
        <= segments[-1].offset + segments[-1].num_bytes - num_blocks * bytes_per_block
        < page_bytes
    )


def test_a_terabyte_is_locked_in_pieces_that_drivers_take() -> None:
    bytes_per_block = 61 * 576 * 2 * 16
    segments = cut_segments((1 << 40) // bytes_per_block, bytes_per_block, 1 << 30, 64 << 30, 4096)
    assert len(segments) == 17
    assert segments[0].num_bytes <= 1 << 30
    assert max(segment.num_bytes for segment in segments) <= MAX_SEGMENT_BYTES


def test_copies_are_not_merged_across_two_registrations() -> None:
    layout = named_layout("block_first", GROUP, NUM_BLOCKS)
    pool = DeviceTier(host_memory(layout.nbytes), layout)
    tier = make_tier(LockingDevice())
    assert tier.arena.wait(PATIENCE_S)
    slots = [Slot(slot) for slot in range(NUM_BLOCKS)]
    memory_bytes(pool.memory)[:] = np.random.default_rng(0).integers(
        0, 256, layout.nbytes, np.uint8
    )
    sizes = [num * GROUP.bytes_per_block for num in SEGMENTS]
    batch = stage(pool, slots, tier, slots)
    assert batch.size.tolist() == sizes
    CpuDevice().copy(batch, Direction.STORE)
    back = stage(tier, slots, DeviceTier(host_memory(layout.nbytes), layout), slots)
    assert back.size.tolist() == sizes
    CpuDevice().copy(back, Direction.LOAD)
    np.testing.assert_array_equal(memory_bytes(back.dst), memory_bytes(pool.memory))
    tier.close()


# -- locking ---------------------------------------------------------------------------------------


def placed(tier: HostTier, segments: Sequence[int]) -> list[tuple[int, int]]:
    """Return the address and size of these segments."""
    cut = [tier.arena.segments[number] for number in segments]
    return [(tier.memory.address + segment.offset, segment.num_bytes) for segment in cut]


@given(st.sets(st.integers(0, 4)), st.sets(st.integers(0, 4)))
def test_segments_are_locked_in_order_and_unlocked_once_whatever_is_refused(
    refused: set[int], broken: set[int]
) -> None:
    device = LockingDevice(refused=refused, broken=broken)
    tier = make_tier(device)
    assert tier.arena.wait(PATIENCE_S)
    assert [segment.num_blocks for segment in tier.arena.segments] == SEGMENTS
    assert tier.num_open == tier.num_free == NUM_BLOCKS, "refused pages are used all the same"
    assert [(each.address, each.nbytes) for each in device.asked] == placed(tier, range(5))
    granted = sorted({0, 1, 2, 3, 4} - refused - broken)
    assert [(each.address, each.nbytes) for each in device.locked] == placed(tier, granted)
    assert device.unlocked == []
    found = next(finding for finding in tier.findings() if finding.topic == "page-locked").found
    assert (found == "yes", found == "no") == (len(granted) == 5, not granted)
    tier.close()
    tier.close()
    assert device.unlocked == device.locked


def test_small_arena_is_locked_as_one_when_the_tier_is_made() -> None:
    device = LockingDevice()
    tier = make_tier(device, ArenaOptions())
    assert tier.num_open == NUM_BLOCKS
    assert [each.nbytes for each in device.locked] == [
        -(-NUM_BLOCKS * GROUP.bytes_per_block // PAGE) * PAGE
    ]
    assert len(tier.seams) == 0
    assert Finding("page-locked", "yes") in tier.findings()
    tier.close()


# -- opening ---------------------------------------------------------------------------------------


def test_slots_open_as_their_segment_becomes_ready() -> None:
    device = LockingDevice(num_granted=1)
    tier = make_tier(device)
    assert (tier.num_slots, tier.num_open, tier.num_free, tier.num_used) == (NUM_BLOCKS, 4, 4, 0)
    assert tier.allocate(5) is None
    assert tier.allocate(3) == [0, 1, 2]
    assert tier.num_used == 3
    found = {finding.topic: finding for finding in tier.findings()}
    assert found["host memory"].note == "the rest is being prepared"
    assert found["page-locked"].found.endswith("GiB, so far")
    for num_open in (12, 20, 28):
        device.grant_next(tier.arena)
        assert (tier.num_open, tier.num_free, tier.num_used) == (num_open, num_open - 3, 3)
        assert tier.ready_memory.nbytes == num_open * GROUP.bytes_per_block
    assert tier.allocate(25) == list(range(3, 28)), "old and new slots are neighbours"
    device.grant_next(tier.arena)
    assert tier.allocate(2) == [28, 29]
    tier.free([Slot(slot) for slot in range(NUM_BLOCKS)])
    assert (tier.num_free, tier.num_used) == (NUM_BLOCKS, 0)
    assert Finding("page-locked", "yes") in tier.findings()
    assert all(finding.topic != "host memory" for finding in tier.findings())
    tier.close()


def test_closed_slots_can_not_be_freed() -> None:
    pool = SlotPool(4, num_open=2)
    with pytest.raises(ValueError, match="slot 2 is none of the 2 that are open"):
        pool.free([Slot(2)])
    with pytest.raises(AssertionError, match="more slots"):
        pool.open(3)
    assert (pool.num_free, pool.num_used, pool.longest_run()) == (2, 0, 2)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=12), st.integers(0, 5))
def test_a_growing_pool_gives_out_each_open_slot_once(
    steps: list[tuple[int, int]], num_open: int
) -> None:
    pool = SlotPool(40, num_open)
    held: list[Slot] = []
    for num_more, wanted in steps:
        pool.open(min(num_more, 40 - pool.num_open))
        num_open = min(num_open + num_more, 40)
        slots = pool.allocate(wanted)
        assert (slots is None) == (wanted > num_open - len(held))
        held += slots or []
        assert len(set(held)) == len(held)
        assert all(0 <= slot < num_open for slot in held)
        assert (pool.num_open, pool.num_used) == (num_open, len(held))
        if len(held) > 6:
            pool.free(held[:3])
            del held[:3]


# -- what can go wrong -----------------------------------------------------------------------------


def resident(address: int, num_bytes: int) -> list[int]:
    """Return 1 for each page that is in memory, else 0."""
    found = (ctypes.c_ubyte * (num_bytes // PAGE))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), found) == 0
    return [byte & 1 for byte in found]


def num_resident(segment: Segment, tier: HostTier) -> int:
    return sum(resident(tier.memory.address + segment.offset, segment.num_bytes))


class ShortOf:
    """Touches memory until this segment; memory runs out in the middle of it."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(
        self, address: int, num_bytes: int, num_threads: int, is_wanted: Callable[[], bool]
    ) -> bool:
        self._left -= 1
        if self._left < 0:
            pages.touch(address, num_bytes // 2, num_threads)
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return pages.touch(address, num_bytes, num_threads, is_wanted)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_slots_without_memory_stay_closed(number: int, caplog: pytest.LogCaptureFixture) -> None:
    device = LockingDevice()
    tier = make_tier(device, SMALL_PAGES, ShortOf(number))
    assert tier.arena.wait(PATIENCE_S)
    there = sum(SEGMENTS[:number])
    assert (tier.num_slots, tier.num_open, tier.num_free) == (NUM_BLOCKS, there, there)
    assert tier.allocate(there + 1) is None
    slots = tier.allocate(there)
    assert slots is not None
    (line,) = (finding for finding in tier.findings() if finding.topic == "host memory")
    assert line.note == "allocation failed: Cannot allocate memory"
    assert caplog.text.count("host memory is short") == 1
    assert num_resident(tier.arena.segments[number], tier) == 0, "kept from a system that is short"
    assert num_resident(tier.arena.segments[number - 1], tier) > 0
    tier.close()
    assert len(device.unlocked) == len(device.locked) == number


def test_no_memory_at_the_start_is_an_error() -> None:
    device = LockingDevice()
    with pytest.raises(
        ConfigError, match="cannot be allocated: Cannot allocate memory; lower host"
    ):
        make_tier(device, touch=ShortOf(0))
    assert device.asked == []


def test_close_stops_in_the_middle_and_unlocks_what_was_locked() -> None:
    arrived = Event()

    def touch(
        address: int, num_bytes: int, num_threads: int, is_wanted: Callable[[], bool]
    ) -> bool:
        if not arrived.is_set() and len(device.asked) == 2:
            arrived.set()
            while is_wanted():  # until the tier is closed
                arrived.wait()
        return pages.touch(address, num_bytes, num_threads, is_wanted)

    device = LockingDevice()
    tier = make_tier(device, touch=touch)
    assert arrived.wait(PATIENCE_S)
    tier.close()
    tier.close()
    assert len(device.asked) == len(device.locked) == 2, "more was locked for a closed tier"
    assert device.unlocked == device.locked
    assert tier.num_open == 12
    assert tier.arena.wait(0)


# -- the kernel's favours --------------------------------------------------------------------------


def refuse(*args: object) -> None:
    raise OSError(errno.EINVAL, "Invalid argument")


def test_refused_huge_pages_are_a_finding_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "advise", refuse)  # also touches the pages the old way
    tier = make_tier(CpuDevice(), ArenaOptions())
    assert Finding("huge pages", "no: Invalid argument") in tier.findings()
    assert tier.num_open == NUM_BLOCKS
    tier.close()


def test_huge_pages_that_must_be_had_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "advise", refuse)
    with pytest.raises(ConfigError, match="huge_pages: on.*Invalid argument; use auto"):
        make_tier(CpuDevice(), ArenaOptions(huge_pages=HugePages.ON))


def test_huge_pages_can_be_switched_off() -> None:
    tier = make_tier(CpuDevice(), ArenaOptions(huge_pages=HugePages.OFF))
    assert Finding("huge pages", "no: switched off") in tier.findings()
    tier.close()


def test_memory_of_a_node_that_is_not_there_is_a_finding_not_an_error() -> None:
    for node, found in ((None, "unknown"), (1023, "no")):
        tier = make_tier(LockingDevice(node=node), ArenaOptions())
        lines = {finding.topic: finding.found for finding in tier.findings()}
        assert lines["host memory is near the device"] == found
        assert tier.num_open == NUM_BLOCKS
        tier.close()


def test_memory_is_asked_for_near_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(pages, "prefer_node", lambda *args: asked.append(args))
    tier = make_tier(LockingDevice(node=1))
    last = tier.arena.segments[-1]
    assert asked == [(tier.memory.address, last.offset + last.num_bytes, 1)]
    tier.close()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_page_is_there_after_it_was_touched(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PIECE_BYTES", 8 * PAGE)
    num_pages = 37
    area = mmap.mmap(-1, (num_pages + 2) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(pages.MADV_NOHUGEPAGE)
    address = np.frombuffer(area, np.uint8).ctypes.data
    assert pages.touch(address + PAGE, num_pages * PAGE, num_threads)
    assert resident(address, len(area)) == [0, *[1] * num_pages, 0]


def test_touching_stops_when_it_is_not_wanted() -> None:
    memory = host_memory(2 * PAGE)
    assert not pages.touch(memory.address, memory.nbytes, 1, lambda: False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_bytes": 0},
        {"segment_bytes": MAX_SEGMENT_BYTES + 1},
        {"threads": -1},
        {"page_bytes": 0},
    ],
)
def test_options_that_can_not_be_used_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ArenaOptions(**wrong)  # type: ignore[arg-type]
