"""A slab as a scheduler's cache: look-ups, evictions, and recovery by a restart."""

from __future__ import annotations

import threading

import pytest

from kvtier.cache.block_cache import BlockState, Change
from kvtier.core.errors import ConfigError
from kvtier.observe.specs import REFUSED_BLOCKS
from kvtier.testing.storage import StoredBlocks
from tests.connectors.storage_world import (
    DIGEST,
    World,
    key_of,
    memory,
    open_world,
)

# -- look-ups --------------------------------------------------------------------------------------


def test_stored_block_is_found_when_it_is_on_disk_and_not_before(worlds: list[World]) -> None:
    tier = memory(4)
    world = open_world(worlds, tier)
    tier.open_writes.clear()
    world.submit(False, [1])
    assert world.find(1) is BlockState.ARRIVING
    assert world.slab.num_jobs == 1
    tier.open_writes.set()
    world.settle()
    assert world.find(1) is BlockState.STORAGE
    assert world.slab.num_jobs == 0
    assert world.load(1) == [1]


def test_block_is_written_once(worlds: list[World]) -> None:
    tier = memory(4)
    world = open_world(worlds, tier)
    world.store(1, 2)
    assert world.store(1, 2, 3).keys == [key_of(3)]
    assert tier.num_written == 3


def test_block_twice_in_a_job_takes_one_slot(worlds: list[World]) -> None:
    tier = memory(4)
    world = open_world(worlds, tier)
    assert world.store(1, 1).keys == [key_of(1)]
    assert tier.num_used == 1


def test_load_names_what_was_there(worlds: list[World]) -> None:
    world = open_world(worlds, memory(4))
    world.store(1, 2)
    job = world.submit(True, [1, 9, 2])
    world.settle()
    assert job.keys == [key_of(1), key_of(2)]
    assert not job.is_whole


def test_jobs_with_nothing_to_do_are_finished_at_once(worlds: list[World]) -> None:
    world = open_world(worlds, memory(4))
    job = world.submit(True, [1])
    (finished,) = world.slab.take_finished()
    assert (finished, job.keys, job.is_whole) == (job, [], False)
    world.store(1)
    job = world.submit(False, [1])
    (finished,) = world.slab.take_finished()
    assert (finished, job.keys, job.is_whole) == (job, [], True)


# -- what leaves -----------------------------------------------------------------------------------


def test_least_recently_used_block_leaves_and_the_start_of_a_prompt_last(
    worlds: list[World],
) -> None:
    world = open_world(worlds, memory(4))
    world.store(1, 2)
    world.store(3, 4)
    world.slab.touch([key_of(1), key_of(2)])
    world.slab.take_changes()
    world.store(5)
    world.store(6, 7)
    assert [change.keys for change in world.slab.take_changes() if change.is_removed] == [
        [key_of(4)],
        [key_of(3), key_of(2)],
    ]


def test_block_that_is_read_stays_and_what_has_no_room_is_refused(worlds: list[World]) -> None:
    tier = memory(3)
    world = open_world(worlds, tier)
    world.store(1, 2)
    tier.open_reads.clear()
    world.submit(True, [1, 2])
    job = world.submit(False, [3, 4])
    tier.open_reads.set()
    world.settle()
    assert job.keys == [key_of(3)]
    assert world.take_counted()(REFUSED_BLOCKS, "disk") == 1
    assert world.load(1, 2) == [1, 2]


def test_blocks_of_a_job_stay_in_storage_until_it_is_finished(worlds: list[World]) -> None:
    world = open_world(worlds, memory(3))
    world.submit(False, [1, 2, 3])
    world.slab.drain()
    assert world.store(9).keys == [], "there was no room for it"
    assert world.store(9).keys == [key_of(9)]


def test_job_never_evicts_its_own_blocks(worlds: list[World]) -> None:
    world = open_world(worlds, memory(3))
    world.store(1, 2)
    world.store(1, 2, 3, 4)
    assert world.load(1, 2, 3) == [1, 2, 3]


def test_more_than_the_disk_can_take_is_refused(worlds: list[World]) -> None:
    tier = memory(32)
    world = open_world(worlds, tier, most_queued=3)
    tier.open_writes.clear()
    first, second = world.submit(False, [1, 2]), world.submit(False, [3, 4, 5])
    tier.open_writes.set()
    world.settle()
    assert len(first.keys) == 2
    assert second.keys == [key_of(3)]
    assert world.take_counted()(REFUSED_BLOCKS, "disk") == 2
    assert world.store(4, 5, 6).keys == [key_of(4), key_of(5), key_of(6)]


def test_changes_are_told_in_order(worlds: list[World]) -> None:
    world = open_world(worlds, memory(2))
    world.store(1, 2)
    world.store(3)
    assert world.slab.take_changes() == [
        Change([key_of(1), key_of(2)], "disk", is_removed=False),
        Change([key_of(2)], "disk", is_removed=True),
        Change([key_of(3)], "disk", is_removed=False),
    ]
    assert world.slab.take_changes() == []


# -- restart ---------------------------------------------------------------------------------------


def test_restart_finds_blocks_and_does_not_write_them_again(worlds: list[World]) -> None:
    stored_blocks = StoredBlocks()
    before = World(memory(4, stored_blocks))
    before.store(1, 2)
    before.slab.close()
    tier = memory(4, stored_blocks)
    world = open_world(worlds, tier)
    assert tier.num_unfound == 2
    assert world.load(1) == [1]
    assert world.store(1, 2).keys == []
    assert tier.num_written == 0
    assert tier.num_unfound == 0


def test_recovered_blocks_are_adopted_along_a_prompt_or_one_by_one(worlds: list[World]) -> None:
    stored_blocks = StoredBlocks()
    before = World(memory(6, stored_blocks))
    before.store(1, 2, 3, 5)
    before.slab.close()
    tier = memory(6, stored_blocks)
    world = open_world(worlds, tier)
    keys = [key_of(number) for number in (1, 2, 3, 4, 5)]
    assert world.slab.adopt([key_of(9), *keys[:2]]) == keys[:2]
    assert world.slab.locate(keys[0]) is BlockState.STORAGE
    assert world.slab.locate(keys[2]) is BlockState.NOWHERE, "nobody has adopted it"
    assert world.slab.adopt(keys, stops_at_gap=False) == [keys[2], keys[4]]
    assert (world.slab.num_blocks, tier.num_unfound) == (4, 0)
    assert world.load(1, 2, 3, 5) == [1, 2, 3, 5]


def test_start_of_a_prompt_leaves_last_after_a_restart_too(worlds: list[World]) -> None:
    stored_blocks = StoredBlocks()
    before = World(memory(3, stored_blocks))
    before.store(1, 2, 3)
    before.slab.close()
    world = open_world(worlds, memory(3, stored_blocks))
    world.slab.touch(world.slab.adopt([key_of(number) for number in (1, 2, 3)]))
    world.slab.take_changes()
    world.store(9)
    (left, _) = world.slab.take_changes()
    assert (left.keys, left.is_removed) == ([key_of(3)], True)


def test_what_was_found_without_room_for_it_is_a_miss_and_leaves_nothing(
    worlds: list[World],
) -> None:
    stored_blocks = StoredBlocks()
    before = World(memory(2, stored_blocks))
    before.store(1)
    before.slab.close()
    tier = memory(2, stored_blocks)
    world = open_world(worlds, tier)
    tier.open_writes.clear()
    world.submit(False, [2, 3])
    assert tier.is_writing.wait(60)
    assert world.find(1) is BlockState.NOWHERE
    tier.open_writes.set()
    world.settle()
    assert tier.num_used == world.slab.num_blocks == 2


def test_other_namespace_finds_nothing(worlds: list[World]) -> None:
    stored_blocks = StoredBlocks()
    before = World(memory(4, stored_blocks))
    before.store(1)
    before.slab.close()
    other = World(memory(4, stored_blocks), digest=b"e" * 32)
    assert other.find(1) is BlockState.NOWHERE
    other.slab.close()


@pytest.mark.parametrize("digest", [b"namespace", b"d" * 31, b"d" * 33])
def test_namespace_that_can_not_be_stored_is_refused_at_once(
    worlds: list[World], digest: bytes
) -> None:
    num_threads = threading.active_count()
    with pytest.raises(ConfigError, match=f"namespace of {len(digest)} bytes .* 32 bytes of"):
        World(memory(4), digest=digest)
    assert threading.active_count() == num_threads
    world = open_world(worlds, memory(4))
    with pytest.raises(ConfigError, match=f"namespace of {len(digest)} bytes"):
        world.slab.digest = digest
    assert world.slab.digest == DIGEST, "the one that it had"
    world.store(1)


def test_slab_is_left_alone_until_blocks_have_names(worlds: list[World]) -> None:
    stored_blocks = StoredBlocks()
    before = World(memory(4, stored_blocks))
    before.store(1)
    before.slab.close()
    world = open_world(worlds, memory(4, stored_blocks))
    world.slab.digest = b""
    assert world.find(1) is BlockState.NOWHERE
    world.store(2)
    assert world.load(1, 2) == []
    world.slab.digest = DIGEST
    assert world.find(1) is BlockState.STORAGE
    assert world.find(2) is BlockState.NOWHERE
    world.store(2)
    assert world.load(1, 2) == [1, 2]
