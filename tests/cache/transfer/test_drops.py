"""Storage finally drops all blocks that it was ordered to drop, however long it does not answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvtier.cache.transfer import Job, LocalMover, Move, drops
from kvtier.core.types import DISK, HOST, BlockKey, BlockName, Slot
from kvtier.devices import find_device
from kvtier.layout import opaque
from kvtier.testing import FaultyStorage, MemoryStorage, StoredBlocks
from kvtier.tiers import HostTier, MemoryTier, Outcome, StorageFacts, StorageTier
from tests.kit.waiting import wait_until

SIZE = 4096
GROUP = opaque(SIZE)
KEYS = [BlockKey(bytes([number]) * 32) for number in range(9)]
THERE, ABSENT, DAMAGED, FAILED = Outcome
WAYS = {"read": (DISK, HOST), "write": (HOST, DISK)}


class Rig:
    """A mover between eight memory slots and storage with injected failures."""

    def __init__(self, facts: StorageFacts) -> None:
        self.now = 0.0
        self.shelf = StoredBlocks()
        self.host = HostTier(GROUP, 8 * SIZE, find_device("cpu"))
        self.storage = FaultyStorage(MemoryStorage(GROUP, 16, self.shelf, facts=facts))
        tiers: dict[str, MemoryTier | StorageTier] = {HOST: self.host, DISK: self.storage}
        self.mover = LocalMover(tiers, None, clock=lambda: self.now)

    def begin(self, way: str, *numbers: int) -> Job:
        """Begin a move of keys to or from slots: key i uses slot i."""
        slots = [Slot(number) for number in numbers]
        names = [BlockName(b"n" * 32, 0, KEYS[number]) for number in numbers]
        return self.mover.begin(Move(*WAYS[way], slots, slots, names))

    def moved(self, way: str, *numbers: int) -> Job:
        return ended(self.begin(way, *numbers))

    def fill(self, *numbers: int) -> None:
        for number in numbers:
            self.bytes_of(number)[:] = number + 1
        assert self.moved("write", *numbers).succeeded
        assert self.kept >= set(numbers)

    def bytes_of(self, slot: int) -> np.ndarray:
        owner: Any = self.host.memory.owner
        return np.frombuffer(owner, np.uint8)[slot * SIZE : (slot + 1) * SIZE]

    def find(self, *numbers: int) -> list[Outcome]:
        job = self.mover.find(DISK, [KEYS[number] for number in numbers])
        ended(job)
        return list(job.outcomes)

    def drop(self, *numbers: int, for_good: bool = True) -> None:
        self.mover.drop(DISK, [KEYS[number] for number in numbers], for_good)

    @property
    def kept(self) -> set[int]:
        """Return the blocks in storage."""
        return {KEYS.index(key) for key in self.shelf.blocks}

    def is_idle(self) -> bool:
        return all(gate.lane.is_idle for gate in self.mover._gates.values())

    def stop_answering(self) -> None:
        """Let look-ups fail until the breaker of their lane is open."""
        for _ in range(3):
            self.storage.fail("find")
            assert self.find(8) == []
        assert not self.mover.has_unindexed(DISK)


def ended(job: Job) -> Job:
    assert job.wait(30), "it hangs"
    return job


def a_rig(facts: StorageFacts) -> Iterator[Rig]:
    rig = Rig(facts)
    yield rig
    rig.storage.release()
    assert rig.mover.close(30) == set()
    rig.host.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Storage whose look-ups take time."""
    yield from a_rig(StorageFacts(num_readers=2))


@pytest.fixture
def quick() -> Iterator[Rig]:
    """Storage that answers at once."""
    yield from a_rig(StorageFacts(finds_at_once=True))


@pytest.fixture
def shared() -> Iterator[Rig]:
    """Storage that answers at once, and that other engines use."""
    yield from a_rig(StorageFacts(finds_at_once=True, is_shared=True))


# -- storage whose look-ups take time --------------------------------------------------------------


def test_drop_reaches_storage(rig: Rig) -> None:
    rig.fill(0, 1, 2)
    rig.drop(1)
    wait_until(lambda: rig.kept == {0, 2})
    wait_until(rig.is_idle)
    assert rig.find(0, 1) == [THERE, ABSENT]
    assert rig.moved("write", 1).succeeded, "it may come again"
    assert rig.storage.num_calls["drop"] == 1


def test_drop_waits_while_storage_is_left_alone_and_goes_before_the_next_look_up(rig: Rig) -> None:
    rig.fill(0, 1)
    rig.stop_answering()
    rig.drop(0)
    wait_until(rig.is_idle)
    assert rig.storage.num_calls["drop"] == 0
    assert rig.kept == {0, 1}
    rig.now += 1
    assert rig.find(0, 1) == [ABSENT, THERE]
    assert rig.kept == {1}
    rig.now += 60
    assert rig.find(0, 1) == [ABSENT, THERE]
    assert rig.storage.num_calls["drop"] == 1


def test_drop_that_fails_is_repeated_before_anything_is_found(rig: Rig) -> None:
    rig.fill(0, 1)
    rig.storage.fail("drop", 1)
    rig.storage.fail("drop", 2)
    rig.drop(0)
    wait_until(lambda: rig.storage.num_calls["drop"] == 1)
    assert rig.find(0, 1) == [], "it can't be dropped, so it is not looked for"
    assert rig.kept == {0, 1}
    assert rig.find(0, 1) == [ABSENT, THERE]
    assert rig.kept == {1}


def test_look_up_under_way_does_not_find_what_is_dropped_meanwhile(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.fill(0, 1)
    find = rig.storage.find

    def find_slowly(keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        outcomes = find(keys, timeout_s)
        assert outcomes == [THERE] * 2
        rig.drop(0)
        return outcomes

    monkeypatch.setattr(rig.storage, "find", find_slowly)
    assert rig.find(0, 1) == [ABSENT, THERE]


def test_what_is_owed_is_neither_read_nor_written_and_others_are(rig: Rig) -> None:
    rig.fill(0, 1, 2)
    rig.stop_answering()
    rig.drop(0, for_good=False)
    for slot in range(3):
        rig.bytes_of(slot)[:] = 0
    job = rig.moved("read", 1, 0, 2)
    assert (job.lost, job.gone, job.num_damaged) == ({1}, {1}, 0)
    assert [int(rig.bytes_of(slot)[0]) for slot in range(3)] == [0, 2, 3]
    job = rig.moved("write", 0, 3)
    assert (job.lost, job.gone) == ({0}, set())
    assert rig.kept == {0, 1, 2, 3}
    num_gets, num_puts = rig.storage.num_calls["get"], rig.storage.num_calls["put"]
    for way, route in WAYS.items():
        for _ in range(4):
            job = rig.moved(way, 0)
            assert job.lost == {0}
        assert rig.mover.accepts(route), "it was not storage that failed"
    assert (rig.storage.num_calls["get"], rig.storage.num_calls["put"]) == (num_gets, num_puts)
    rig.now += 1
    assert rig.find(0, 3) == [ABSENT, THERE]
    assert rig.moved("write", 0).succeeded


def test_places_of_outcomes_are_those_of_the_move(rig: Rig) -> None:
    rig.fill(0, 1, 2, 3)
    rig.stop_answering()
    rig.drop(1)
    rig.shelf.spoiled.add(KEYS[2])
    job = rig.moved("read", 0, 1, 2, 5, 3)
    assert (job.lost, job.gone, job.num_damaged) == ({1, 2, 3}, {1, 2, 3}, 1)


def test_drop_does_not_wait_for_the_next_look_up(rig: Rig) -> None:
    rig.fill(0, 1)
    rig.stop_answering()
    rig.drop(0)
    wait_until(rig.is_idle)
    rig.mover.scrub()
    wait_until(rig.is_idle)
    assert rig.kept == {0, 1}, "the pause is not over"
    rig.now += 1
    rig.mover.scrub()
    wait_until(lambda: rig.kept == {1})


def test_nothing_to_drop_is_no_answer(rig: Rig) -> None:
    rig.stop_answering()
    rig.now += 1
    rig.drop()
    wait_until(rig.is_idle)
    rig.storage.fail("find")
    assert rig.find(0) == []
    assert not rig.mover.has_unindexed(DISK), "the pause doubled"
    rig.now += 1
    assert not rig.mover.has_unindexed(DISK)


def test_storage_that_owes_too_many_is_not_written_to(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drops, "MAX_OWED", 3)
    rig.fill(0, 1, 2, 3, 4)
    rig.stop_answering()
    rig.drop(0, 1)
    assert rig.mover.accepts(WAYS["write"])
    rig.drop(1, 2)
    assert not rig.mover.accepts(WAYS["write"])
    assert rig.mover.accepts(WAYS["read"])
    job = rig.moved("write", 5, 6)
    assert (job.lost, job.gone) == ({0, 1}, set())
    assert rig.moved("read", 4).succeeded
    rig.drop(3)
    rig.now += 1
    assert rig.find(0, 1, 2, 3, 4) == [ABSENT] * 4 + [THERE]
    assert rig.kept == {4}, "none was forgotten"
    assert rig.mover.accepts(WAYS["write"])
    assert rig.moved("write", 5, 6).succeeded


def test_the_end_tells_what_was_not_dropped(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.fill(0, 1)
    rig.stop_answering()
    rig.drop(0, 1)
    with caplog.at_level(logging.WARNING):
        assert rig.mover.close(30) == set()
    assert "blocks were not dropped" in caplog.text
    assert "num=2" in caplog.text
    rig.drop(1)  # closed: no worker is left to do it


def test_look_up_that_got_no_answer_says_nothing(rig: Rig) -> None:
    rig.fill(0, 1)
    rig.stop_answering()
    assert rig.find(0, 1) == [], "storage is left alone"
    rig.now += 1
    rig.storage.refuse("find")
    assert rig.find(0, 1) == [FAILED] * 2
    rig.now += 2
    assert rig.find(0, 1) == [THERE] * 2


def test_storage_may_have_what_it_gave_no_answer_for(rig: Rig) -> None:
    """Blocks whose look-up failed count as present in storage until they are found or dropped."""
    rig.fill(0, 1, 2)
    assert not rig.mover.has_unindexed(DISK)
    for fault in (rig.storage.lose, rig.storage.fail):
        fault("find")
        rig.find(0, 1)
        assert rig.mover.has_unindexed(DISK)
        assert rig.find(0) == [THERE]
        assert rig.mover.has_unindexed(DISK)
        rig.drop(1)
        assert not rig.mover.has_unindexed(DISK), "nobody wants it any more"
        wait_until(rig.is_idle)


def test_keys_without_an_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drops, "MAX_UNANSWERED", 2)
    keys = drops.Unanswered()
    keys.note(KEYS[:3], [])
    assert len(keys) == 2
    keys.note(KEYS[:3], [THERE, FAILED, ABSENT])
    assert len(keys) == 1
    keys.note(KEYS[1:2], [ABSENT])
    assert len(keys) == 0


@pytest.mark.parametrize("way", WAYS)
def test_trial_that_hangs_does_not_keep_others_out_for_good(way: str) -> None:
    """One worker hangs in the trial of a tripped breaker. After a time-out, others may try."""
    rigs = a_rig(StorageFacts(num_readers=2, num_writers=2))
    rig, call = next(rigs), {"read": "get", "write": "put"}[way]
    rig.fill(0, 1)
    for _ in range(3):
        rig.storage.refuse(call)
        assert rig.moved(way, 0).lost == {0}
    assert not rig.mover.accepts(WAYS[way])
    rig.now += 1
    rig.storage.hang(call)
    num_calls = rig.storage.num_calls[call]
    hanging = rig.begin(way, 0)
    wait_until(lambda: rig.storage.num_calls[call] > num_calls)
    rig.now += 10
    assert not rig.mover.accepts(WAYS[way]), "it may still answer"
    rig.now += 200
    assert rig.mover.accepts(WAYS[way])
    assert rig.moved(way, 1).succeeded
    assert not hanging.done
    assert next(rigs, None) is None


# -- storage that answers at once ------------------------------------------------------------------


def test_drop_that_fails_at_once_is_repeated(quick: Rig) -> None:
    quick.fill(0, 1)
    quick.storage.fail("drop", 1)
    quick.storage.fail("drop", 2)
    quick.drop(0)
    assert quick.kept == {0, 1}
    assert quick.find(0, 1) == [ABSENT, THERE], "though storage has it still"
    assert quick.kept == {0, 1}
    assert quick.moved("write", 0).lost == {0}
    assert quick.moved("read", 0).gone == {0}
    quick.mover.scrub()
    assert quick.kept == {1}
    assert quick.moved("write", 0).succeeded
    assert quick.find(0) == [THERE]


def test_storage_that_can_not_drop_is_asked_again_after_a_pause(quick: Rig) -> None:
    quick.fill(0, 1)
    for nth in range(1, 4):
        quick.storage.fail("drop", nth)
    quick.drop(0)
    for _ in range(5):
        assert quick.find(0, 1) == [ABSENT, THERE]
        quick.mover.scrub()
    assert quick.storage.num_calls["drop"] == 3
    quick.now += 1
    quick.drop(1)
    assert quick.kept == set()
    assert quick.storage.num_calls["drop"] == 4, "both in one call"


# -- storage that answers at once, and that others use ---------------------------------------------


def test_drop_that_others_are_told_of_is_waited_for_by_nobody(shared: Rig) -> None:
    shared.fill(0, 1)
    shared.storage.hold("drop")
    shared.drop(0)
    assert shared.find(0, 1) == [ABSENT, THERE]
    assert shared.kept == {0, 1}, "nobody was told yet"
    assert shared.moved("write", 0).lost == {0}
    shared.storage.release("drop")
    wait_until(lambda: shared.kept == {1})
    wait_until(shared.is_idle)
    assert shared.moved("write", 0).succeeded
    assert shared.find(0) == [THERE]


def test_drop_that_others_do_not_hear_of_is_repeated_after_a_pause(shared: Rig) -> None:
    shared.fill(0, 1)
    for nth in range(1, 4):
        shared.storage.fail("drop", nth)
    shared.drop(0)
    for _ in range(5):
        wait_until(shared.is_idle)
        shared.mover.scrub()
    wait_until(shared.is_idle)
    assert shared.storage.num_calls["drop"] == 3
    assert shared.kept == {0, 1}
    shared.now += 1
    shared.mover.scrub()
    wait_until(lambda: shared.kept == {1})
