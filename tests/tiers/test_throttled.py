"""A tier of limited bandwidth behaves as any other tier, except for its speed."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.cache.tokens import Cache
from kvtier.core.config import CacheConfig
from kvtier.core.errors import ConfigError
from kvtier.core.types import BlockKey, BlockName
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import named_layout
from kvtier.testing import MemoryStorage, StoredBlocks, host_memory, memory_bytes
from kvtier.tiers import DeviceTier, Outcome, Pieces
from kvtier.tiers.wrappers import ThrottledTier
from tests.cache.tokens.harness import GROUP

NUM_BLOCKS = 4
KEYS = [BlockKey(bytes([number]) * 32) for number in range(NUM_BLOCKS)]
NAMES = [BlockName(b"n" * 32, depth, key) for depth, key in enumerate(KEYS)]
RATE = 2 * GROUP.bytes_per_block
"""Two blocks a second."""


class Time:
    """Clock that advances while a caller sleeps."""

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
    return MemoryStorage(GROUP, 2 * NUM_BLOCKS, StoredBlocks())


@pytest.fixture
def tier(inner: MemoryStorage, time: Time) -> ThrottledTier:
    return ThrottledTier(inner, RATE, time.clock, time.sleep)


def test_blocks_pass_unchanged_and_at_the_pace(tier: ThrottledTier, time: Time) -> None:
    memory = host_memory(2 * NUM_BLOCKS * GROUP.bytes_per_block)
    content = memory_bytes(memory)
    half = len(content) // 2
    content[:half] = np.arange(half) % 251
    content[half:] = 0
    places = memory.address + np.arange(2 * NUM_BLOCKS) * GROUP.bytes_per_block
    blocks = Pieces.whole(places, GROUP.bytes_per_block)
    assert tier.put(NAMES, blocks.pick(slice(NUM_BLOCKS)), 1.0) == [Outcome.THERE] * NUM_BLOCKS
    assert time.now == pytest.approx(2.0)
    copies = blocks.pick(slice(NUM_BLOCKS, None))
    assert tier.get(KEYS, copies, 1.0) == [Outcome.THERE] * NUM_BLOCKS
    assert time.now == pytest.approx(4.0)
    assert np.array_equal(content[:half], content[half:])
    assert tier.scrub(1 << 20).num_checked == NUM_BLOCKS
    assert time.now == pytest.approx(6.0)


def test_a_tier_that_is_slower_anyway_is_not_held_up(inner: MemoryStorage, time: Time) -> None:
    slow = ThrottledTier(inner, RATE, time.clock, time.sleep)
    outer = ThrottledTier(slow, 10 * RATE, time.clock, time.sleep)
    memory = host_memory(GROUP.bytes_per_block)
    outer.put(NAMES[:1], Pieces.whole([memory.address], GROUP.bytes_per_block), 1.0)
    assert time.now == pytest.approx(0.5)


def test_all_else_is_that_of_the_tier_inside(tier: ThrottledTier, inner: MemoryStorage) -> None:
    assert (tier.name, tier.num_blocks) == (inner.name, inner.num_blocks)
    assert tier.facts is inner.facts
    assert not tier.has_unindexed
    assert tier.find(KEYS, 1.0) == [Outcome.ABSENT] * len(KEYS)
    tier.drop(KEYS, for_good=True)
    assert "MiB/s" in tier.findings()[-1].found
    tier.close()
    assert inner.closed


def test_the_setting_throttles_the_storage_of_a_cache() -> None:
    layout = named_layout("layer_first", GROUP, 4)
    pool = DeviceTier(host_memory(layout.nbytes), layout)
    config = CacheConfig(host_capacity="2x", disk_bytes_per_s="10MiB")
    cache = Cache(config, CpuDevice(), pool, storage=[MemoryStorage(GROUP, 4, StoredBlocks())])
    assert any(line.found == "at most 10.0 MiB/s" for line in cache.findings())
    cache.close()
    with pytest.raises(ConfigError, match="disk_bytes_per_s"):
        CacheConfig(disk_bytes_per_s="fast")
