"""A tier that is no faster than it is told to be: as any tier, but for its pace."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.cache import Cache
from kvtier.config import CacheConfig
from kvtier.devices.cpu import CpuDevice
from kvtier.errors import ConfigError
from kvtier.layout import named_layout
from kvtier.testing import MemoryStorage, Shelf, host_memory, memory_bytes
from kvtier.tiers import DeviceTier, LoadResult
from kvtier.tiers.wrappers import ThrottledTier
from kvtier.types import BlockKey, BlockName

from .world import GROUP

NUM_BLOCKS = 4
KEYS = [BlockKey(bytes([number]) * 32) for number in range(NUM_BLOCKS)]
NAMES = [BlockName(b"n" * 32, depth, key) for depth, key in enumerate(KEYS)]
RATE = 2 * GROUP.bytes_per_block
"""Two blocks a second."""


class Time:
    """Passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def inner() -> MemoryStorage:
    return MemoryStorage(GROUP, 2 * NUM_BLOCKS, Shelf())


@pytest.fixture
def tier(inner: MemoryStorage, time: Time) -> ThrottledTier:
    return ThrottledTier(inner, RATE, time.clock, time.sleep)


def test_blocks_pass_unchanged_and_at_the_pace(tier: ThrottledTier, time: Time) -> None:
    memory = host_memory(2 * NUM_BLOCKS * GROUP.bytes_per_block)
    content = memory_bytes(memory)
    half = len(content) // 2
    content[:half] = np.arange(half) % 251
    content[half:] = 0
    places = memory.address + np.arange(2 * NUM_BLOCKS, dtype=np.uint64) * np.uint64(
        GROUP.bytes_per_block
    )
    slots = tier.allocate(NUM_BLOCKS)
    assert tier.store(NAMES, slots, places[:NUM_BLOCKS]) == [True] * NUM_BLOCKS
    assert time.now == pytest.approx(2.0)
    assert tier.load(KEYS, slots, places[NUM_BLOCKS:]) == [LoadResult.OK] * NUM_BLOCKS
    assert time.now == pytest.approx(4.0)
    assert np.array_equal(content[:half], content[half:])
    assert tier.scrub(1 << 20).num_checked == NUM_BLOCKS
    assert time.now == pytest.approx(6.0)


def test_a_tier_that_is_slower_anyway_is_not_held_up(inner: MemoryStorage, time: Time) -> None:
    slow = ThrottledTier(inner, RATE, time.clock, time.sleep)
    outer = ThrottledTier(slow, 10 * RATE, time.clock, time.sleep)
    memory = host_memory(GROUP.bytes_per_block)
    outer.store(NAMES[:1], outer.allocate(1), np.array([memory.address], np.uint64))
    assert time.now == pytest.approx(0.5)


def test_room_is_that_of_the_tier_inside(tier: ThrottledTier, inner: MemoryStorage) -> None:
    assert (tier.name, tier.num_slots) == (inner.name, inner.num_slots)
    slots = tier.allocate(3)
    assert (tier.num_free, tier.num_used) == (inner.num_free, inner.num_used) == (5, 3)
    tier.free(slots)
    assert tier.num_used == 0
    assert tier.num_unclaimed == 0
    assert tier.claim(KEYS) == []
    assert tier.num_welcome(3) == 3
    assert "MiB/s" in tier.findings()[-1].found
    tier.close()
    assert inner.closed


def test_the_setting_throttles_the_storage_of_a_cache() -> None:
    layout = named_layout("layer_first", GROUP, 4)
    pool = DeviceTier(host_memory(layout.nbytes), layout)
    config = CacheConfig(host_capacity="2x", disk_bytes_per_s="10MiB")
    cache = Cache(config, CpuDevice(), pool, storage=MemoryStorage(GROUP, 4, Shelf()))
    assert any(line.found == "at most 10.0 MiB/s" for line in cache.findings())
    cache.close()
    with pytest.raises(ConfigError, match="disk_bytes_per_s"):
        CacheConfig(disk_bytes_per_s="fast")
