"""A slab as a scheduler's cache: failures, and shutdown."""

from __future__ import annotations

import pytest

from kvtier.cache.block_cache import BlockState, Change
from kvtier.cache.transfer import LocalMover
from kvtier.connectors.common.names import block_key
from kvtier.connectors.common.opening import NoStorage
from kvtier.core.errors import TierError
from kvtier.observe.specs import FAILED_BLOCKS, REFUSED_BLOCKS, UNWRITTEN_BLOCKS
from kvtier.testing.storage import StoredBlocks
from tests.connectors.storage_harness import (
    BLOCK_BYTES,
    DIGEST,
    GROUP,
    Harness,
    key_of,
    memory,
    open_harness,
)

# -- whatever goes wrong ---------------------------------------------------------------------------


def test_damaged_block_is_lost_and_can_be_stored_again(harnesss: list[Harness]) -> None:
    tier = memory(4)
    harness = open_harness(harnesss, tier)
    harness.store(1, 2, 3)
    tier.spoiled.add(block_key(DIGEST, key_of(2)))
    assert harness.load(1, 2, 3) == [1, 3]
    assert harness.find(2) is BlockState.NOWHERE
    assert harness.slab.take_changes()[-1] == Change([key_of(2)], "disk", is_removed=True)
    tier.spoiled.clear()
    harness.store(2)
    assert harness.load(2) == [2]


def test_block_that_two_read_is_given_back_once_when_it_is_lost(harnesss: list[Harness]) -> None:
    tier = memory(4)
    harness = open_harness(harnesss, tier)
    harness.store(1)
    tier.spoiled.add(block_key(DIGEST, key_of(1)))
    tier.open_reads.clear()
    harness.submit(True, [1])
    harness.submit(True, [1])
    tier.open_reads.set()
    harness.settle()
    assert tier.num_used == 0
    left = [change for change in harness.slab.take_changes() if change.is_removed]
    assert left == [Change([key_of(1)], "disk", is_removed=True)]


def test_store_that_fails_leaves_nothing(harnesss: list[Harness]) -> None:
    tier = memory(4)
    harness = open_harness(harnesss, tier)
    tier.refused.add(block_key(DIGEST, key_of(2)))
    finished = harness.store(1, 2)
    assert (finished.keys, finished.is_whole) == ([key_of(1)], False)
    assert harness.find(2) is BlockState.NOWHERE
    assert harness.take_counted()(FAILED_BLOCKS, "host", "disk") == 1
    assert tier.num_used == 1


def test_tier_that_raises_costs_the_job_only(
    harnesss: list[Harness], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = memory(4)
    harness = open_harness(harnesss, tier)
    harness.store(1)
    with monkeypatch.context() as patch:
        patch.setattr(tier, "get", lambda *_: 1 / 0)
        patch.setattr(tier, "put", lambda *_: 1 / 0)
        assert harness.load(1) == []
        assert harness.store(2).keys == []
    assert "transfer failed" in caplog.text
    assert harness.store(1, 2).keys == [key_of(2)], (
        "a read that failed says nothing about the block"
    )
    assert harness.load(1, 2) == [1, 2]


def test_no_storage_is_all_misses(harnesss: list[Harness]) -> None:
    harness = open_harness(harnesss, NoStorage("disk", GROUP))
    assert harness.store(1, 2).keys == []
    assert harness.load(1) == []
    assert harness.take_counted()(REFUSED_BLOCKS, "disk") == 2


def test_disk_that_fails_again_and_again_is_left_alone_and_evicts_nothing(
    harnesss: list[Harness],
) -> None:
    tier = memory(5)
    harness = open_harness(harnesss, tier)
    harness.store(1, 2)
    tier.unreachable = True
    for number in range(10, 13):
        harness.store(number)
    assert harness.take_counted()(FAILED_BLOCKS, "host", "disk") == 3
    assert harness.store(*range(20, 26)).keys == []
    counted = harness.take_counted()
    assert counted(REFUSED_BLOCKS, "disk") == 6
    assert counted("kvtier_evicted_blocks_total", "disk") == 0
    assert counted(FAILED_BLOCKS, "host", "disk") == 0


def test_what_a_disk_that_is_left_alone_has_is_a_miss_until_it_is_tried_again(
    harnesss: list[Harness],
) -> None:
    tier = memory(5)
    harness = open_harness(harnesss, tier)
    harness.store(1, 2)
    tier.unreachable = True
    for _ in range(3):
        assert harness.find(1) is BlockState.STORAGE
        assert harness.load(1) == []
    assert harness.find(1) is BlockState.NOWHERE
    tier.unreachable = False
    harness.now_s += 60
    assert harness.find(1) is BlockState.STORAGE
    assert harness.load(1, 2) == [1, 2]


def test_day_s_writes_are_a_bound(harnesss: list[Harness]) -> None:
    tier = memory(8)
    harnesss.append(harness := Harness(tier, bytes_per_day=24 * BLOCK_BYTES))
    assert harness.store(1).keys == [key_of(1)]
    assert harness.store(2).keys == []
    assert harness.take_counted()(UNWRITTEN_BLOCKS, "disk") == 1
    harness.now_s += 3601
    assert harness.store(2).keys == [key_of(2)]


def test_blocks_of_a_job_that_come_one_by_one_do_not_push_out_its_start(
    harnesss: list[Harness],
) -> None:
    tier = memory(3)
    harnesss.append(harness := Harness(tier, num_rows=5))
    assert harness.store(1, 2, 3, 4, 5).keys == [key_of(1), key_of(2), key_of(3)]
    harness.slab.take_changes()
    harness.store(9)
    (left, _) = harness.slab.take_changes()
    assert (left.keys, left.is_removed) == ([key_of(3)], True), "the end leaves before the start"


def test_rows_of_a_finished_job_can_be_used_for_other_blocks(harnesss: list[Harness]) -> None:
    harnesss.append(harness := Harness(memory(8), num_rows=2))
    for first in range(0, 8, 2):
        harness.store(first, first + 1)
    for first in range(0, 8, 2):
        assert harness.load(first, first + 1) == [first, first + 1]


# -- the end ---------------------------------------------------------------------------------------


def test_queued_stores_are_finished_before_the_end() -> None:
    stored_blocks = StoredBlocks()
    tier = memory(8, stored_blocks)
    harness = Harness(tier)
    tier.open_writes.clear()
    for number in range(4):
        harness.submit(False, [number])
    tier.open_writes.set()
    harness.slab.close()
    assert tier.closed
    assert len(stored_blocks.blocks) == 4


def test_stores_that_take_too_long_are_dropped_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.cache.storage_only.CLOSE_WAIT_S", 0.01)
    stored_blocks = StoredBlocks()
    tier = memory(8, stored_blocks)
    harness = Harness(tier)
    tier.open_writes.clear()
    for number in range(4):
        harness.submit(False, [number])
    assert tier.is_writing.wait(60)
    close = LocalMover.close

    def release(mover: LocalMover, timeout_s: float) -> set[str]:
        hanging = close(mover, timeout_s)
        tier.open_writes.set()
        return hanging

    monkeypatch.setattr(LocalMover, "close", release)
    harness.slab.close()
    assert tier.closed
    assert len(stored_blocks.blocks) == 1, "the one that was under way"


def test_write_that_does_not_end_keeps_the_memory_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.cache.storage_only.CLOSE_WAIT_S", 0.01)
    monkeypatch.setattr("kvtier.cache.storage_only.END_WAIT_S", 0.01)
    tier = memory(8)
    harness = Harness(tier)
    tier.open_writes.clear()
    harness.submit(False, [1])
    assert tier.is_writing.wait(60)
    with pytest.raises(TierError, match="takes over"):
        harness.slab.close()
    assert not tier.closed
    tier.open_writes.set()
    harness.slab.close()
    assert tier.closed
