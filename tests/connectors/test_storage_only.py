"""A slab as a scheduler's cache: look-ups, evictions, and recovery by a restart."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from kvtier.cache.block_cache import BlockState, Change
from kvtier.core.errors import ConfigError
from kvtier.observe.specs import REFUSED_BLOCKS
from kvtier.testing.storage import StoredBlocks
from tests.connectors.storage_harness import (
    DIGEST,
    Harness,
    key_of,
    memory,
    open_harness,
)

# -- look-ups --------------------------------------------------------------------------------------


def test_stored_block_is_found_when_it_is_on_disk_and_not_before(harnesss: list[Harness]) -> None:
    tier = memory(4)
    harness = open_harness(harnesss, tier)
    tier.open_writes.clear()
    harness.submit(False, [1])
    assert harness.find(1) is BlockState.ARRIVING
    assert harness.slab.num_jobs == 1
    tier.open_writes.set()
    harness.settle()
    assert harness.find(1) is BlockState.STORAGE
    assert harness.slab.num_jobs == 0
    assert harness.load(1) == [1]


def test_block_is_written_once(harnesss: list[Harness]) -> None:
    tier = memory(4)
    harness = open_harness(harnesss, tier)
    harness.store(1, 2)
    assert harness.store(1, 2, 3).keys == [key_of(3)]
    assert tier.num_written == 3


def test_block_twice_in_a_job_takes_one_slot(harnesss: list[Harness]) -> None:
    tier = memory(4)
    harness = open_harness(harnesss, tier)
    assert harness.store(1, 1).keys == [key_of(1)]
    assert tier.num_used == 1


def test_load_names_what_was_there(harnesss: list[Harness]) -> None:
    harness = open_harness(harnesss, memory(4))
    harness.store(1, 2)
    job = harness.submit(True, [1, 9, 2])
    harness.settle()
    assert job.keys == [key_of(1), key_of(2)]
    assert not job.is_whole


def test_jobs_with_nothing_to_do_are_finished_at_once(harnesss: list[Harness]) -> None:
    harness = open_harness(harnesss, memory(4))
    job = harness.submit(True, [1])
    (finished,) = harness.slab.take_finished()
    assert (finished, job.keys, job.is_whole) == (job, [], False)
    harness.store(1)
    job = harness.submit(False, [1])
    (finished,) = harness.slab.take_finished()
    assert (finished, job.keys, job.is_whole) == (job, [], True)


# -- what leaves -----------------------------------------------------------------------------------


def test_least_recently_used_block_leaves_and_the_start_of_a_prompt_last(
    harnesss: list[Harness],
) -> None:
    harness = open_harness(harnesss, memory(4))
    harness.store(1, 2)
    harness.store(3, 4)
    harness.slab.touch([key_of(1), key_of(2)])
    harness.slab.take_changes()
    harness.store(5)
    harness.store(6, 7)
    assert [change.keys for change in harness.slab.take_changes() if change.is_removed] == [
        [key_of(4)],
        [key_of(3), key_of(2)],
    ]


def test_block_that_is_read_stays_and_what_has_no_room_is_refused(harnesss: list[Harness]) -> None:
    tier = memory(3)
    harness = open_harness(harnesss, tier)
    harness.store(1, 2)
    tier.open_reads.clear()
    harness.submit(True, [1, 2])
    job = harness.submit(False, [3, 4])
    tier.open_reads.set()
    harness.settle()
    assert job.keys == [key_of(3)]
    assert harness.take_counted()(REFUSED_BLOCKS, "disk") == 1
    assert harness.load(1, 2) == [1, 2]


def test_blocks_of_a_job_stay_in_storage_until_it_is_finished(harnesss: list[Harness]) -> None:
    harness = open_harness(harnesss, memory(3))
    harness.submit(False, [1, 2, 3])
    harness.slab.drain()
    assert harness.store(9).keys == [], "there was no room for it"
    assert harness.store(9).keys == [key_of(9)]


def test_job_never_evicts_its_own_blocks(harnesss: list[Harness]) -> None:
    harness = open_harness(harnesss, memory(3))
    harness.store(1, 2)
    harness.store(1, 2, 3, 4)
    assert harness.load(1, 2, 3) == [1, 2, 3]


def test_more_than_the_disk_can_take_is_refused(harnesss: list[Harness]) -> None:
    tier = memory(32)
    harness = open_harness(harnesss, tier, most_queued=3)
    tier.open_writes.clear()
    first, second = harness.submit(False, [1, 2]), harness.submit(False, [3, 4, 5])
    tier.open_writes.set()
    harness.settle()
    assert len(first.keys) == 2
    assert second.keys == [key_of(3)]
    assert harness.take_counted()(REFUSED_BLOCKS, "disk") == 2
    assert harness.store(4, 5, 6).keys == [key_of(4), key_of(5), key_of(6)]


def test_blocks_of_a_tier_that_is_only_read_are_not_counted_as_refused(
    harnesss: list[Harness],
) -> None:
    stored_blocks = StoredBlocks()
    writer = memory(4, stored_blocks)
    open_harness(harnesss, writer).store(1)
    facts = replace(writer.facts, takes_writes=False)
    tier = memory(4, stored_blocks, facts)
    harness = open_harness(harnesss, tier)
    assert harness.store(2).keys == []
    assert harness.load(1, 2) == [1]
    assert tier.num_written == 0
    assert harness.take_counted()(REFUSED_BLOCKS, "disk") == 0


def test_changes_are_told_in_order(harnesss: list[Harness]) -> None:
    harness = open_harness(harnesss, memory(2))
    harness.store(1, 2)
    harness.store(3)
    assert harness.slab.take_changes() == [
        Change([key_of(1), key_of(2)], "disk", is_removed=False),
        Change([key_of(2)], "disk", is_removed=True),
        Change([key_of(3)], "disk", is_removed=False),
    ]
    assert harness.slab.take_changes() == []


# -- restart ---------------------------------------------------------------------------------------


def test_restart_finds_blocks_and_does_not_write_them_again(harnesss: list[Harness]) -> None:
    stored_blocks = StoredBlocks()
    before = Harness(memory(4, stored_blocks))
    before.store(1, 2)
    before.slab.close()
    tier = memory(4, stored_blocks)
    harness = open_harness(harnesss, tier)
    assert tier.num_unindexed == 2
    assert harness.load(1) == [1]
    assert harness.store(1, 2).keys == []
    assert tier.num_written == 0
    assert tier.num_unindexed == 0


def test_recovered_blocks_are_adopted_along_a_prompt_or_one_by_one(harnesss: list[Harness]) -> None:
    stored_blocks = StoredBlocks()
    before = Harness(memory(6, stored_blocks))
    before.store(1, 2, 3, 5)
    before.slab.close()
    tier = memory(6, stored_blocks)
    harness = open_harness(harnesss, tier)
    keys = [key_of(number) for number in (1, 2, 3, 4, 5)]
    assert harness.slab.adopt([key_of(9), *keys[:2]]) == keys[:2]
    assert harness.slab.locate(keys[0]) is BlockState.STORAGE
    assert harness.slab.locate(keys[2]) is BlockState.NOWHERE, "nobody has adopted it"
    assert harness.slab.adopt(keys, stops_at_gap=False) == [keys[2], keys[4]]
    assert (harness.slab.num_blocks, tier.num_unindexed) == (4, 0)
    assert harness.load(1, 2, 3, 5) == [1, 2, 3, 5]


def test_start_of_a_prompt_leaves_last_after_a_restart_too(harnesss: list[Harness]) -> None:
    stored_blocks = StoredBlocks()
    before = Harness(memory(3, stored_blocks))
    before.store(1, 2, 3)
    before.slab.close()
    harness = open_harness(harnesss, memory(3, stored_blocks))
    harness.slab.touch(harness.slab.adopt([key_of(number) for number in (1, 2, 3)]))
    harness.slab.take_changes()
    harness.store(9)
    (left, _) = harness.slab.take_changes()
    assert (left.keys, left.is_removed) == ([key_of(3)], True)


def test_what_was_found_without_room_for_it_is_a_miss_and_leaves_nothing(
    harnesss: list[Harness],
) -> None:
    stored_blocks = StoredBlocks()
    before = Harness(memory(2, stored_blocks))
    before.store(1)
    before.slab.close()
    tier = memory(2, stored_blocks)
    harness = open_harness(harnesss, tier)
    tier.open_writes.clear()
    harness.submit(False, [2, 3])
    assert tier.is_writing.wait(60)
    assert harness.find(1) is BlockState.NOWHERE
    tier.open_writes.set()
    harness.settle()
    assert tier.num_used == harness.slab.num_blocks == 2


def test_other_namespace_finds_nothing(harnesss: list[Harness]) -> None:
    stored_blocks = StoredBlocks()
    before = Harness(memory(4, stored_blocks))
    before.store(1)
    before.slab.close()
    other = Harness(memory(4, stored_blocks), digest=b"e" * 32)
    assert other.find(1) is BlockState.NOWHERE
    other.slab.close()


@pytest.mark.parametrize("digest", [b"namespace", b"d" * 31, b"d" * 33])
def test_namespace_that_can_not_be_stored_is_refused_at_once(
    harnesss: list[Harness], digest: bytes
) -> None:
    num_threads = threading.active_count()
    with pytest.raises(ConfigError, match=f"namespace of {len(digest)} bytes .* 32 bytes of"):
        Harness(memory(4), digest=digest)
    assert threading.active_count() == num_threads
    harness = open_harness(harnesss, memory(4))
    with pytest.raises(ConfigError, match=f"namespace of {len(digest)} bytes"):
        harness.slab.digest = digest
    assert harness.slab.digest == DIGEST, "the one that it had"
    harness.store(1)


def test_slab_is_left_alone_until_blocks_have_names(harnesss: list[Harness]) -> None:
    stored_blocks = StoredBlocks()
    before = Harness(memory(4, stored_blocks))
    before.store(1)
    before.slab.close()
    harness = open_harness(harnesss, memory(4, stored_blocks))
    harness.slab.digest = b""
    assert harness.find(1) is BlockState.NOWHERE
    harness.store(2)
    assert harness.load(1, 2) == []
    harness.slab.digest = DIGEST
    assert harness.find(1) is BlockState.STORAGE
    assert harness.find(2) is BlockState.NOWHERE
    harness.store(2)
    assert harness.load(1, 2) == [1, 2]
