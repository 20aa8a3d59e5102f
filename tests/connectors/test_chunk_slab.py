"""A slab as a cache that is asked by an engine's scheduler: what is there, what leaves, what fails.

Bytes follow from keys, and are compared wherever a load says that they are in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import shake_128
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.connectors.vllm.chunks import ChunkState
from kvtier.connectors.vllm.identity import chunk_key
from kvtier.connectors.vllm.pieces.chunk_slab import Change, ChunkSlab, FinishedJob
from kvtier.layout import opaque
from kvtier.testing import host_memory, memory_bytes
from kvtier.testing.faulty_disk import FaultyDisk
from kvtier.testing.storage import MemoryStorage, Shelf
from kvtier.tiers import StorageTier
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.none import NoStorage

CHUNK_BYTES = 4096
GROUP = opaque(CHUNK_BYTES)
DIGEST = b"d" * 32


def _key(number: int) -> bytes:
    return b"%036d" % number


def _bytes(key: bytes) -> np.ndarray:
    return np.frombuffer(shake_128(key).digest(CHUNK_BYTES), np.uint8)


class World:
    """A slab and the host memory of an engine: no two jobs on their way share a row."""

    def __init__(self, tier: StorageTier, most_queued: int = 100, num_rows: int = 256) -> None:
        self.slab = ChunkSlab(tier, DIGEST, most_queued)
        self._memory = host_memory(num_rows * CHUNK_BYTES)
        self.rows = memory_bytes(self._memory).reshape(num_rows, CHUNK_BYTES)
        self._next_job = self._next_row = 0
        self.finished: dict[int, FinishedJob] = {}

    def submit(self, is_load: bool, numbers: Sequence[int]) -> int:
        """A job over the first rows; what is loaded can be told from what is not."""
        self._next_job += 1
        keys = [_key(number) for number in numbers]
        if self._next_row + len(numbers) > len(self.rows):
            self._next_row = 0
        rows = range(self._next_row, self._next_row + len(numbers))
        self._next_row += len(numbers)
        at = self._memory.address + np.array(rows, np.uint64) * np.uint64(CHUNK_BYTES)
        if is_load:
            self.slab.load(self._next_job, keys, at)
        else:
            for row, key in zip(rows, keys, strict=True):
                self.rows[row] = _bytes(key)
            self.slab.store(self._next_job, keys, range(len(keys)), at)
        self._rows_of = dict(zip(keys, rows, strict=True))
        return self._next_job

    def settle(self) -> None:
        self.slab.drain()
        self.finished.update((job.job_id, job) for job in self.slab.take_finished())
        self.slab.check_invariants()

    def store(self, *numbers: int) -> FinishedJob:
        job = self.submit(False, numbers)
        self.settle()
        return self.finished[job]

    def load(self, *numbers: int) -> list[int]:
        """Which are in place now, with the right bytes."""
        self.rows[:] = 0
        job = self.submit(True, numbers)
        self.settle()
        for key in self.finished[job].keys:
            assert (self.rows[self._rows_of[key]] == _bytes(key)).all(), "wrong bytes"
        return [int(key) for key in self.finished[job].keys]


def _memory(num_slots: int, shelf: Shelf | None = None) -> MemoryStorage:
    return MemoryStorage(GROUP, num_slots, shelf or Shelf())


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
    tier = _memory(4)
    world = _world(worlds, tier)
    tier.open_writes.clear()
    world.submit(False, [1])
    assert world.slab.find(_key(1)) is ChunkState.WRITING
    assert world.slab.num_jobs == 1
    tier.open_writes.set()
    world.settle()
    assert world.slab.find(_key(1)) is ChunkState.READY
    assert world.slab.num_jobs == 0
    assert world.load(1) == [1]


def test_chunk_is_written_once(worlds: list[World]) -> None:
    tier = _memory(4)
    world = _world(worlds, tier)
    world.store(1, 2)
    assert world.store(1, 2, 3).keys == [_key(3)]
    assert tier.num_written == 3


def test_chunk_twice_in_a_job_takes_one_slot(worlds: list[World]) -> None:
    tier = _memory(4)
    world = _world(worlds, tier)
    assert world.store(1, 1).keys == [_key(1)]
    assert tier.num_free == 3


def test_load_names_what_was_there(worlds: list[World]) -> None:
    world = _world(worlds, _memory(4))
    world.store(1, 2)
    job = world.submit(True, [1, 9, 2])
    world.settle()
    assert world.finished[job].keys == [_key(1), _key(2)]
    assert not world.finished[job].is_whole


def test_jobs_with_nothing_to_do_are_finished_at_once(worlds: list[World]) -> None:
    world = _world(worlds, _memory(4))
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
    world = _world(worlds, _memory(4))
    world.store(1, 2)
    world.store(3, 4)
    world.slab.touch([_key(1), _key(2)])
    world.slab.take_changes()
    world.store(5)
    world.store(6, 7)
    assert [change.keys for change in world.slab.take_changes() if change.is_gone] == [
        [_key(4)],
        [_key(3), _key(2)],
    ]


def test_chunk_that_is_read_stays_and_what_has_no_room_is_refused(worlds: list[World]) -> None:
    tier = _memory(3)
    world = _world(worlds, tier)
    world.store(1, 2)
    tier.open_reads.clear()
    world.submit(True, [1, 2])
    job = world.submit(False, [3, 4])
    tier.open_reads.set()
    world.settle()
    assert world.finished[job].keys == [_key(3)]
    assert world.slab.take_counts().refused == 1
    assert world.load(1, 2) == [1, 2]


def test_job_never_evicts_its_own_chunks(worlds: list[World]) -> None:
    world = _world(worlds, _memory(3))
    world.store(1, 2)
    world.store(1, 2, 3, 4)
    assert world.load(1, 2, 3) == [1, 2, 3]


def test_more_than_the_disk_can_take_is_refused(worlds: list[World]) -> None:
    tier = _memory(32)
    world = _world(worlds, tier, most_queued=3)
    tier.open_writes.clear()
    first, second = world.submit(False, [1, 2]), world.submit(False, [3, 4, 5])
    tier.open_writes.set()
    world.settle()
    assert len(world.finished[first].keys) == 2
    assert world.finished[second].keys == [_key(3)]
    assert world.slab.take_counts().refused == 2
    assert world.store(4, 5, 6).keys == [_key(4), _key(5), _key(6)]


def test_changes_are_told_in_order(worlds: list[World]) -> None:
    world = _world(worlds, _memory(2))
    world.store(1, 2)
    world.store(3)
    assert world.slab.take_changes() == [
        Change([_key(1), _key(2)], is_gone=False),
        Change([_key(2)], is_gone=True),
        Change([_key(3)], is_gone=False),
    ]
    assert world.slab.take_changes() == []


# -- restart ---------------------------------------------------------------------------------------


def test_restart_finds_chunks_and_does_not_write_them_again(worlds: list[World]) -> None:
    shelf = Shelf()
    before = World(_memory(4, shelf))
    before.store(1, 2)
    before.slab.close()
    tier = _memory(4, shelf)
    world = _world(worlds, tier)
    assert world.slab.num_unclaimed == 2
    assert world.load(1) == [1]
    assert world.store(1, 2).keys == []
    assert tier.num_written == 0
    assert world.slab.take_counts().found_again == 2


def test_what_is_asked_for_next_is_claimed_along(worlds: list[World]) -> None:
    shelf = Shelf()
    before = World(_memory(6, shelf))
    before.store(1, 2, 3, 5)
    before.slab.close()
    world = _world(worlds, _memory(6, shelf))
    following = [_key(number) for number in (2, 3, 4, 5)]
    assert world.slab.find(_key(9), lambda: following) is ChunkState.ABSENT
    assert world.slab.num_chunks == 0, "the first is not there, so the rest are of no use"
    assert world.slab.find(_key(1), lambda: following) is ChunkState.READY
    assert (world.slab.num_chunks, world.slab.num_unclaimed) == (3, 1)
    assert world.slab.find(_key(5)) is ChunkState.READY
    assert world.load(1, 2, 3, 5) == [1, 2, 3, 5]


def test_other_namespace_finds_nothing(worlds: list[World]) -> None:
    shelf = Shelf()
    before = World(_memory(4, shelf))
    before.store(1)
    before.slab.close()
    slab = ChunkSlab(_memory(4, shelf), b"e" * 32, 100)
    assert slab.find(_key(1)) is ChunkState.ABSENT
    slab.close()


# -- whatever goes wrong ---------------------------------------------------------------------------


def test_damaged_chunk_is_lost_and_can_be_stored_again(worlds: list[World]) -> None:
    tier = _memory(4)
    world = _world(worlds, tier)
    world.store(1, 2, 3)
    tier.spoiled.add(chunk_key(DIGEST, _key(2)))
    assert world.load(1, 2, 3) == [1, 3]
    assert world.slab.find(_key(2)) is ChunkState.ABSENT
    assert world.slab.take_changes()[-1] == Change([_key(2)], is_gone=True)
    tier.spoiled.clear()
    world.store(2)
    assert world.load(2) == [2]


def test_chunk_that_two_read_is_given_back_once_when_it_is_lost(worlds: list[World]) -> None:
    tier = _memory(4)
    world = _world(worlds, tier)
    world.store(1)
    tier.spoiled.add(chunk_key(DIGEST, _key(1)))
    tier.open_reads.clear()
    world.submit(True, [1])
    world.submit(True, [1])
    tier.open_reads.set()
    world.settle()
    assert tier.num_free == 4
    assert world.slab.take_counts().lost == 1


def test_store_that_fails_leaves_nothing(worlds: list[World]) -> None:
    tier = _memory(4)
    world = _world(worlds, tier)
    tier.refused.add(chunk_key(DIGEST, _key(2)))
    finished = world.store(1, 2)
    assert (finished.keys, finished.is_whole) == ([_key(1)], False)
    assert world.slab.find(_key(2)) is ChunkState.ABSENT
    assert tier.num_free == 3


def test_tier_that_raises_costs_the_job_only(
    worlds: list[World], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = _memory(4)
    world = _world(worlds, tier)
    world.store(1)
    with monkeypatch.context() as patch:
        patch.setattr(tier, "load", lambda *_: 1 / 0)
        patch.setattr(tier, "store", lambda *_: 1 / 0)
        assert world.load(1) == []
        assert world.store(2).keys == []
    assert "transfer failed" in caplog.text
    assert world.store(1, 2).keys == [_key(1), _key(2)]


def test_no_storage_is_all_misses(worlds: list[World]) -> None:
    world = _world(worlds, NoStorage(GROUP))
    assert world.store(1, 2).keys == []
    assert world.load(1) == []
    assert world.slab.take_counts().refused == 2


def test_disk_that_switched_itself_off_evicts_nothing(tmp_path: Path, worlds: list[World]) -> None:
    system = FaultyDisk()
    options = DiskOptions(tmp_path, 4 * CHUNK_BYTES, errors_until_off=2)
    memory = host_memory(CHUNK_BYTES)
    world = _world(worlds, DiskTier(options, GROUP, memory, system))
    world.store(1, 2)
    system.fail("write", count=100)
    for number in range(10, 14):
        world.store(number)
    world.slab.take_counts()
    assert world.store(20).keys == []
    assert world.slab.find(_key(1)) is ChunkState.ABSENT
    counts = world.slab.take_counts()
    assert (counts.refused, counts.evicted) == (1, 0)


# -- the end ---------------------------------------------------------------------------------------


def test_queued_stores_are_finished_before_the_end() -> None:
    shelf = Shelf()
    tier = _memory(8, shelf)
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
    tier = _memory(8, shelf)
    world = World(tier)
    tier.open_writes.clear()
    for number in range(4):
        world.submit(False, [number])
    world.slab._give_up.set = _then(world.slab._give_up.set, tier.open_writes.set)  # type: ignore[method-assign]
    world.slab.close()
    assert tier.closed
    assert len(shelf.blocks) == 1, "the one that was under way"


def _then(first, second):  # type: ignore[no-untyped-def]
    def both() -> None:
        first()
        second()

    return both


# -- in any order ----------------------------------------------------------------------------------


class Model(RuleBasedStateMachine):
    """Loads are right or misses; capacity is a bound; nothing is lost but by eviction."""

    @initialize()
    def begin(self) -> None:
        self.shelf = Shelf()
        self.tier = _memory(5, self.shelf)
        self.world = World(self.tier, most_queued=4)

    numbers = st.lists(st.integers(0, 11), min_size=1, max_size=5)

    @rule(numbers=numbers)
    def store(self, numbers: list[int]) -> None:
        self.world.submit(False, numbers)

    @rule(numbers=numbers)
    def load(self, numbers: list[int]) -> None:
        self.world.settle()
        ready = {n for n in numbers if self.world.slab.find(_key(n)) is ChunkState.READY}
        good = {n for n in ready if chunk_key(DIGEST, _key(n)) not in self.tier.spoiled}
        assert set(self.world.load(*numbers)) == good

    @rule(numbers=numbers)
    def load_and_go_on(self, numbers: list[int]) -> None:
        self.world.submit(True, numbers)

    @rule(numbers=numbers)
    def touch(self, numbers: list[int]) -> None:
        self.world.slab.touch([_key(number) for number in numbers])

    @rule(number=st.integers(0, 11))
    def spoil(self, number: int) -> None:
        self.tier.spoiled ^= {chunk_key(DIGEST, _key(number))}

    @rule()
    def collect(self) -> None:
        self.world.settle()

    @rule()
    def restart(self) -> None:
        self.world.slab.close()
        spoiled = self.tier.spoiled
        self.tier = _memory(5, self.shelf)
        self.tier.spoiled = spoiled
        self.world = World(self.tier, most_queued=4)

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "world"):
            assert self.world.slab.num_chunks <= 5

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()
            assert self.tier.num_free == 5 - self.world.slab.num_chunks, "a slot is lost"
            self.world.slab.close()


TestAnyOrder = Model.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
