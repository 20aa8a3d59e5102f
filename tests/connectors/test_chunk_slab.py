"""A slab as a cache that a scheduler asks: what is there, what leaves, what fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvtier.connectors.vllm.identity import chunk_key
from kvtier.errors import ConfigError, TierError
from kvtier.keyed_cache import Change, Place
from kvtier.testing.storage import Shelf
from kvtier.tiers import StorageTier
from kvtier.tiers.none import NoStorage
from kvtier.transfer import LocalMover
from tests.connectors.slab_world import (
    CHUNK_BYTES,
    DIGEST,
    GROUP,
    World,
    key_of,
    memory,
)


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    """Closed at the end, whatever happened."""
    made: list[World] = []
    yield made
    for each in made:
        each.slab.close()


def _world(worlds: list[World], tier: StorageTier, most_queued: int = 100) -> World:
    worlds.append(World(tier, most_queued))
    return worlds[-1]


# -- what is there ---------------------------------------------------------------------------------


def test_stored_chunk_is_found_when_it_is_on_disk_and_not_before(worlds: list[World]) -> None:
    tier = memory(4)
    world = _world(worlds, tier)
    tier.open_writes.clear()
    world.submit(False, [1])
    assert world.slab.find(key_of(1)) is Place.ARRIVING
    assert world.slab.num_jobs == 1
    tier.open_writes.set()
    world.settle()
    assert world.slab.find(key_of(1)) is Place.STORAGE
    assert world.slab.num_jobs == 0
    assert world.load(1) == [1]


def test_chunk_is_written_once(worlds: list[World]) -> None:
    tier = memory(4)
    world = _world(worlds, tier)
    world.store(1, 2)
    assert world.store(1, 2, 3).keys == [key_of(3)]
    assert tier.num_written == 3


def test_chunk_twice_in_a_job_takes_one_slot(worlds: list[World]) -> None:
    tier = memory(4)
    world = _world(worlds, tier)
    assert world.store(1, 1).keys == [key_of(1)]
    assert tier.num_used == 1


def test_load_names_what_was_there(worlds: list[World]) -> None:
    world = _world(worlds, memory(4))
    world.store(1, 2)
    job = world.submit(True, [1, 9, 2])
    world.settle()
    assert world.finished[job].keys == [key_of(1), key_of(2)]
    assert not world.finished[job].is_whole


def test_jobs_with_nothing_to_do_are_finished_at_once(worlds: list[World]) -> None:
    world = _world(worlds, memory(4))
    job = world.submit(True, [1])
    (finished,) = world.slab.take_finished()
    assert (finished.job_id, finished.keys, finished.is_whole) == (job, [], False)
    world.store(1)
    job = world.submit(False, [1])
    (finished,) = world.slab.take_finished()
    assert (finished.job_id, finished.keys, finished.is_whole) == (job, [], True)


# -- what leaves -----------------------------------------------------------------------------------


def test_least_recently_used_chunk_leaves_and_the_start_of_a_prompt_last(
    worlds: list[World],
) -> None:
    world = _world(worlds, memory(4))
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


def test_chunk_that_is_read_stays_and_what_has_no_room_is_refused(worlds: list[World]) -> None:
    tier = memory(3)
    world = _world(worlds, tier)
    world.store(1, 2)
    tier.open_reads.clear()
    world.submit(True, [1, 2])
    job = world.submit(False, [3, 4])
    tier.open_reads.set()
    world.settle()
    assert world.finished[job].keys == [key_of(3)]
    assert world.slab.take_counts().refused == 1
    assert world.load(1, 2) == [1, 2]


def test_job_never_evicts_its_own_chunks(worlds: list[World]) -> None:
    world = _world(worlds, memory(3))
    world.store(1, 2)
    world.store(1, 2, 3, 4)
    assert world.load(1, 2, 3) == [1, 2, 3]


def test_more_than_the_disk_can_take_is_refused(worlds: list[World]) -> None:
    tier = memory(32)
    world = _world(worlds, tier, most_queued=3)
    tier.open_writes.clear()
    first, second = world.submit(False, [1, 2]), world.submit(False, [3, 4, 5])
    tier.open_writes.set()
    world.settle()
    assert len(world.finished[first].keys) == 2
    assert world.finished[second].keys == [key_of(3)]
    assert world.slab.take_counts().refused == 2
    assert world.store(4, 5, 6).keys == [key_of(4), key_of(5), key_of(6)]


def test_changes_are_told_in_order(worlds: list[World]) -> None:
    world = _world(worlds, memory(2))
    world.store(1, 2)
    world.store(3)
    assert world.slab.take_changes() == [
        Change([key_of(1), key_of(2)], "disk", is_removed=False),
        Change([key_of(2)], "disk", is_removed=True),
        Change([key_of(3)], "disk", is_removed=False),
    ]
    assert world.slab.take_changes() == []


# -- restart ---------------------------------------------------------------------------------------


def test_restart_finds_chunks_and_does_not_write_them_again(worlds: list[World]) -> None:
    shelf = Shelf()
    before = World(memory(4, shelf))
    before.store(1, 2)
    before.slab.close()
    tier = memory(4, shelf)
    world = _world(worlds, tier)
    assert tier.num_unfound == 2
    assert world.load(1) == [1]
    assert world.store(1, 2).keys == []
    assert tier.num_written == 0
    assert tier.num_unfound == 0


def test_what_is_asked_for_next_is_claimed_along(worlds: list[World]) -> None:
    shelf = Shelf()
    before = World(memory(6, shelf))
    before.store(1, 2, 3, 5)
    before.slab.close()
    tier = memory(6, shelf)
    world = _world(worlds, tier)
    following = [key_of(number) for number in (2, 3, 4, 5)]
    assert world.slab.find(key_of(9), lambda: following) is Place.NOWHERE
    assert world.slab.num_chunks == 0, "the first is not there, so the rest are of no use"
    assert world.slab.find(key_of(1), lambda: following) is Place.STORAGE
    assert (world.slab.num_chunks, tier.num_unfound) == (4, 0)
    assert world.load(1, 2, 3, 5) == [1, 2, 3, 5]


def test_start_of_a_prompt_leaves_last_after_a_restart_too(worlds: list[World]) -> None:
    shelf = Shelf()
    before = World(memory(3, shelf))
    before.store(1, 2, 3)
    before.slab.close()
    world = _world(worlds, memory(3, shelf))
    world.slab.find(key_of(1), lambda: [key_of(2), key_of(3)])
    world.slab.take_changes()
    world.store(9)
    (left, _) = world.slab.take_changes()
    assert (left.keys, left.is_removed) == ([key_of(3)], True)


def test_what_was_found_without_room_for_it_is_a_miss_and_leaves_nothing(
    worlds: list[World],
) -> None:
    shelf = Shelf()
    before = World(memory(2, shelf))
    before.store(1)
    before.slab.close()
    tier = memory(2, shelf)
    world = _world(worlds, tier)
    tier.open_writes.clear()
    world.submit(False, [2, 3])
    assert tier.is_writing.wait(60)
    assert world.slab.find(key_of(1)) is Place.NOWHERE
    tier.open_writes.set()
    world.settle()
    assert tier.num_used == world.slab.num_chunks == 2


def test_other_namespace_finds_nothing(worlds: list[World]) -> None:
    shelf = Shelf()
    before = World(memory(4, shelf))
    before.store(1)
    before.slab.close()
    other = World(memory(4, shelf), digest=b"e" * 32)
    assert other.slab.find(key_of(1)) is Place.NOWHERE
    other.slab.close()


@pytest.mark.parametrize("digest", [b"namespace", b"d" * 31, b"d" * 33])
def test_namespace_that_can_not_be_stored_is_refused_at_once(
    worlds: list[World], digest: bytes
) -> None:
    num_threads = threading.active_count()
    with pytest.raises(ConfigError, match=f"namespace of {len(digest)} bytes .* 32 bytes of"):
        World(memory(4), digest=digest)
    assert threading.active_count() == num_threads
    world = _world(worlds, memory(4))
    with pytest.raises(ConfigError, match=f"namespace of {len(digest)} bytes"):
        world.slab.digest = digest
    assert world.slab.digest == DIGEST, "the one that it had"
    world.store(1)


def test_slab_is_left_alone_until_chunks_have_names(worlds: list[World]) -> None:
    shelf = Shelf()
    before = World(memory(4, shelf))
    before.store(1)
    before.slab.close()
    world = _world(worlds, memory(4, shelf))
    world.slab.digest = b""
    assert world.slab.find(key_of(1)) is Place.NOWHERE
    world.store(2)
    assert world.load(1, 2) == []
    world.slab.digest = DIGEST
    assert world.slab.find(key_of(1)) is Place.STORAGE
    assert world.slab.find(key_of(2)) is Place.NOWHERE
    world.store(2)
    assert world.load(1, 2) == [1, 2]


# -- whatever goes wrong ---------------------------------------------------------------------------


def test_damaged_chunk_is_lost_and_can_be_stored_again(worlds: list[World]) -> None:
    tier = memory(4)
    world = _world(worlds, tier)
    world.store(1, 2, 3)
    tier.spoiled.add(chunk_key(DIGEST, key_of(2)))
    assert world.load(1, 2, 3) == [1, 3]
    assert world.slab.find(key_of(2)) is Place.NOWHERE
    assert world.slab.take_changes()[-1] == Change([key_of(2)], "disk", is_removed=True)
    tier.spoiled.clear()
    world.store(2)
    assert world.load(2) == [2]


def test_chunk_that_two_read_is_given_back_once_when_it_is_lost(worlds: list[World]) -> None:
    tier = memory(4)
    world = _world(worlds, tier)
    world.store(1)
    tier.spoiled.add(chunk_key(DIGEST, key_of(1)))
    tier.open_reads.clear()
    world.submit(True, [1])
    world.submit(True, [1])
    tier.open_reads.set()
    world.settle()
    assert tier.num_used == 0
    assert world.slab.take_counts().lost == 1


def test_store_that_fails_leaves_nothing(worlds: list[World]) -> None:
    tier = memory(4)
    world = _world(worlds, tier)
    tier.refused.add(chunk_key(DIGEST, key_of(2)))
    finished = world.store(1, 2)
    assert (finished.keys, finished.is_whole) == ([key_of(1)], False)
    assert world.slab.find(key_of(2)) is Place.NOWHERE
    assert world.slab.take_counts().failed == 1
    assert tier.num_used == 1


def test_tier_that_raises_costs_the_job_only(
    worlds: list[World], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = memory(4)
    world = _world(worlds, tier)
    world.store(1)
    with monkeypatch.context() as patch:
        patch.setattr(tier, "get", lambda *_: 1 / 0)
        patch.setattr(tier, "put", lambda *_: 1 / 0)
        assert world.load(1) == []
        assert world.store(2).keys == []
    assert "transfer failed" in caplog.text
    assert world.store(1, 2).keys == [key_of(2)], "a read that failed says nothing about the chunk"
    assert world.load(1, 2) == [1, 2]


def test_no_storage_is_all_misses(worlds: list[World]) -> None:
    world = _world(worlds, NoStorage("disk", GROUP))
    assert world.store(1, 2).keys == []
    assert world.load(1) == []
    assert world.slab.take_counts().refused == 2


def test_disk_that_fails_again_and_again_is_left_alone_and_evicts_nothing(
    worlds: list[World],
) -> None:
    tier = memory(5)
    world = _world(worlds, tier)
    world.store(1, 2)
    tier.unreachable = True
    for number in range(10, 13):
        world.store(number)
    assert world.slab.take_counts().failed == 3
    assert world.store(*range(20, 26)).keys == []
    counts = world.slab.take_counts()
    assert (counts.refused, counts.evicted, counts.failed) == (6, 0, 0)


def test_what_a_disk_that_is_left_alone_has_is_a_miss_until_it_is_tried_again(
    worlds: list[World],
) -> None:
    tier = memory(5)
    world = _world(worlds, tier)
    world.store(1, 2)
    tier.unreachable = True
    for _ in range(3):
        assert world.slab.find(key_of(1)) is Place.STORAGE
        assert world.load(1) == []
    assert world.slab.find(key_of(1)) is Place.NOWHERE
    tier.unreachable = False
    world.now_s += 60
    assert world.slab.find(key_of(1)) is Place.STORAGE
    assert world.load(1, 2) == [1, 2]


def test_day_s_writes_are_a_bound(worlds: list[World]) -> None:
    tier = memory(8)
    worlds.append(world := World(tier, bytes_per_day=24 * CHUNK_BYTES))
    assert world.store(1).keys == [key_of(1)]
    assert world.store(2).keys == []
    assert world.slab.take_counts().over_budget == 1
    world.now_s += 3601
    assert world.store(2).keys == [key_of(2)]


def test_chunks_of_a_job_that_come_one_by_one_do_not_push_out_its_start(
    worlds: list[World],
) -> None:
    tier = memory(3)
    worlds.append(world := World(tier, num_rows=5))
    assert world.store(1, 2, 3, 4, 5).keys == [key_of(1), key_of(2), key_of(3)]
    world.slab.take_changes()
    world.store(9)
    (left, _) = world.slab.take_changes()
    assert (left.keys, left.is_removed) == ([key_of(3)], True), "the end leaves before the start"


def test_rows_of_a_finished_job_can_be_used_for_other_chunks(worlds: list[World]) -> None:
    worlds.append(world := World(memory(8), num_rows=2))
    for first in range(0, 8, 2):
        world.store(first, first + 1)
    for first in range(0, 8, 2):
        assert world.load(first, first + 1) == [first, first + 1]


# -- the end ---------------------------------------------------------------------------------------


def test_queued_stores_are_finished_before_the_end() -> None:
    shelf = Shelf()
    tier = memory(8, shelf)
    world = World(tier)
    tier.open_writes.clear()
    for number in range(4):
        world.submit(False, [number])
    tier.open_writes.set()
    world.slab.close()
    assert tier.closed
    assert len(shelf.blocks) == 4


def test_stores_that_take_too_long_are_dropped_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.connectors.vllm.pieces.chunk_slab.CLOSE_WAIT_S", 0.01)
    shelf = Shelf()
    tier = memory(8, shelf)
    world = World(tier)
    tier.open_writes.clear()
    for number in range(4):
        world.submit(False, [number])
    assert tier.is_writing.wait(60)
    close = LocalMover.close

    def let_go(mover: LocalMover, timeout_s: float) -> set[str]:
        hanging = close(mover, timeout_s)
        tier.open_writes.set()
        return hanging

    monkeypatch.setattr(LocalMover, "close", let_go)
    world.slab.close()
    assert tier.closed
    assert len(shelf.blocks) == 1, "the one that was under way"


def test_write_that_does_not_end_keeps_the_memory_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.connectors.vllm.pieces.chunk_slab.CLOSE_WAIT_S", 0.01)
    monkeypatch.setattr("kvtier.connectors.vllm.pieces.chunk_slab.END_WAIT_S", 0.01)
    tier = memory(8)
    world = World(tier)
    tier.open_writes.clear()
    world.submit(False, [1])
    assert tier.is_writing.wait(60)
    with pytest.raises(TierError, match="takes over"):
        world.slab.close()
    assert not tier.closed
    tier.open_writes.set()
    world.slab.close()
    assert tier.closed
