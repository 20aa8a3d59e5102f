"""The sampled count of evicted blocks that are needed again."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvtier.cache.ladder.reuse_sampler import MAX_GONE, MAX_MARKED, ReuseSampler
from kvtier.core.types import DEVICE, DISK, HOST, Slot
from kvtier.index import KeyIndex, make_key_index
from kvtier.index.policies.replayed import LRU
from kvtier.observe import Metrics
from tests.cache.keyed_harness import KEYS, Engine

from .harness import Clock, Harness, count

MakeHarness = Callable[..., Harness]
LONG_A, LONG_B = list(range(9)), list(range(20, 29))
NAME = "kvtier_returned_blocks_total"


class Tiers:
    """An index of two tiers, and a sampler notified of admissions and evictions."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.metrics = Metrics()
        self.index: KeyIndex = make_key_index({HOST: LRU, DISK: LRU}, lambda: b"n" * 32)
        self.returns = ReuseSampler(self.index, self.metrics, self.clock)
        self._num_slots = 0

    def come(self, *keys: bytes, tiers: tuple[str, ...] = (HOST,)) -> None:
        """Add computed blocks to these tiers."""
        blocks = self.index.make(keys)
        for tier in tiers:
            slots = [Slot(self._num_slots + at) for at in range(len(keys))]
            self._num_slots += len(keys)
            self.index.begin_write(blocks, tier, slots)
            self.index.commit(blocks, tier, self.clock.now)
        self.returns.on_admit(map(hash, keys), blocks)

    def evict(self, num: int, tier: str = HOST) -> None:
        leaving = self.index.evict(tier, num)
        self.returns.on_evict(leaving, tier)
        self.index.forget(leaving, tier)

    def returned(self, tier: str = HOST) -> float:
        return count(self.metrics, NAME, tier=tier)


@pytest.fixture
def tiers() -> Tiers:
    return Tiers()


def keys(num: int, seed: int = 1) -> list[bytes]:
    return [random.Random(f"{seed} {at}").randbytes(16) for at in range(num)]


def test_a_block_that_is_computed_again_has_returned(tiers: Tiers) -> None:
    tiers.come(b"a", b"b")
    tiers.evict(2)
    tiers.clock.now = 7.0
    tiers.come(b"a", b"c")
    assert tiers.returned() == 1
    assert count(tiers.metrics, "kvtier_return_seconds_sum", tier=HOST) == 7.0


def test_it_returns_once_for_each_time_that_it_left(tiers: Tiers) -> None:
    tiers.come(b"a")
    for _ in range(3):
        tiers.evict(1)
        tiers.come(b"a")
        tiers.returns.on_admit([hash(b"a")], [tiers.index.make([b"a"])[0]])
    assert tiers.returned() == 3


def test_a_tier_that_never_had_it_is_not_charged(tiers: Tiers) -> None:
    tiers.come(b"a", tiers=(HOST, DISK))
    tiers.evict(1, HOST)
    tiers.come(b"a")
    assert (tiers.returned(HOST), tiers.returned(DISK)) == (1, 0)


def test_the_number_of_a_block_that_is_gone_is_anothers(tiers: Tiers) -> None:
    tiers.come(b"a")
    tiers.evict(1)
    tiers.returns.forget()
    tiers.come(b"b")  # may get the block number of ``a``
    tiers.evict(1)
    tiers.come(b"a")
    assert tiers.returned() == 0


def test_what_was_cleared_does_not_return(tiers: Tiers) -> None:
    tiers.come(b"a")
    tiers.evict(1)
    tiers.returns.forget()
    tiers.come(b"a")
    assert tiers.returned() == 0


def test_many_blocks_are_estimated_from_a_sample_of_bounded_size(tiers: Tiers) -> None:
    num = 8 * MAX_MARKED
    everything = keys(num)
    tiers.come(*everything)
    assert tiers.returns.weight in (8, 16)
    assert len(tiers.returns._marks) <= MAX_MARKED
    tiers.evict(num)
    assert len(tiers.returns._gone) <= MAX_GONE
    tiers.come(*everything[: num // 2])
    # A sample of one in 8 to 16 of 16,000 blocks deviates by 30 to 45 in 1,000 to 2,000.
    assert tiers.returned() == pytest.approx(num // 2, rel=0.2)


def test_the_sample_of_what_has_left_stays_bounded(tiers: Tiers) -> None:
    for turn in range(8):
        tiers.come(*keys(MAX_MARKED // 2, turn))
        tiers.evict(MAX_MARKED // 2)
    assert tiers.returns.weight == 1
    assert len(tiers.returns._gone) == MAX_GONE


def test_what_left_a_tier_of_the_cache_and_is_loaded_has_returned(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(disk_blocks=30)
    harness.serve(LONG_A)
    harness.lose_the_device()
    harness.serve(LONG_A)
    assert count(harness.cache.metrics, NAME, tier=DEVICE) == 4
    assert count(harness.cache.metrics, NAME, tier=HOST) == 0
    harness.lose_the_device()
    harness.cache.clear(HOST)
    harness.serve(LONG_A)
    assert count(harness.cache.metrics, NAME, tier=DEVICE) == 8
    assert count(harness.cache.metrics, NAME, tier=HOST) == 4


def test_what_left_for_good_and_is_computed_again_has_returned(make_harness: MakeHarness) -> None:
    harness = make_harness(host_blocks=0)
    harness.serve(LONG_A)
    harness.lose_the_device()
    harness.serve(LONG_B)
    assert count(harness.cache.metrics, NAME, tier=DEVICE) == 0
    harness.serve(LONG_A)
    assert count(harness.cache.metrics, NAME, tier=DEVICE) == 4


def test_engines_that_bring_keys_are_told_the_same() -> None:
    engine = Engine(num_host=4, num_disk=8)
    engine.store(KEYS[:4])
    engine.carry_out()
    engine.store(KEYS[4:8])
    engine.carry_out()
    metrics = engine.ladder.metrics
    assert count(metrics, "kvtier_evicted_blocks_total", tier=HOST) == 4
    assert count(metrics, NAME, tier=HOST) == 0
    engine.cache.promote(KEYS[:2])
    engine.carry_out()
    assert count(metrics, NAME, tier=HOST) == 2
