"""A rank's disk, with a real slab."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.connectors.vllm.orders import Done, Move, Order
from kvtier.connectors.vllm.rank_disk import RankDisk
from kvtier.devices import find_device
from kvtier.layout import opaque
from kvtier.testing.faulty_disk import FaultyDisk
from kvtier.tiers import HostTier
from kvtier.tiers.disk import DiskOptions, DiskSystem, DiskTier
from kvtier.types import BlockKey, Slot

SIZE = 8192
GROUP = opaque(SIZE)
KEYS = [BlockKey(bytes([number]) * 32) for number in range(1, 12)]


class Rank:
    """A rank with eight host slots and a slab."""

    def __init__(self, path: Path, num_chunks: int = 6, system: DiskSystem | None = None) -> None:
        self.device = find_device("cpu")
        self.host = HostTier(GROUP, 8 * SIZE, self.device)
        options = DiskOptions(path=path, capacity_bytes=num_chunks * SIZE)
        self.tier = DiskTier(options, GROUP, self.host.ready_memory, system)
        self.disk = RankDisk(self.tier, self.host)
        self.num_orders = 0

    def fill(self, slot: int, value: int) -> None:
        self.bytes_of(slot)[:] = value

    def bytes_of(self, slot: int) -> np.ndarray:
        return np.frombuffer(self.host.memory.owner, np.uint8)[slot * SIZE : (slot + 1) * SIZE]

    def do(
        self,
        move: Move,
        keys: list[BlockKey],
        slots: list[int],
        evicted: list[BlockKey] | None = None,
    ) -> Done:
        self.num_orders += 1
        depths = tuple(range(len(keys)))
        order = Order(
            self.num_orders,
            move,
            tuple(keys),
            tuple(map(Slot, slots)),
            depths,
            tuple(evicted or ()),
            b"n" * 32,
        )
        self.disk.carry_out(order)
        while not (done := self.disk.take_done()):
            for each in self.disk._under_way:
                each.job.wait()
        assert done.keys() == {self.num_orders}
        return done[self.num_orders]

    def close(self) -> None:
        assert self.disk.close(10)
        self.host.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.close()


def test_chunk_comes_back_as_it_was(rank: Rank) -> None:
    for slot in range(3):
        rank.fill(slot, slot + 50)
    done = rank.do(Move.DEMOTE, KEYS[:3], [0, 1, 2])
    assert (done.failed, done.num_bytes) == (frozenset(), 3 * SIZE)
    assert done.seconds > 0
    done = rank.do(Move.PROMOTE, [KEYS[2], KEYS[0]], [5, 6])
    assert done.failed == frozenset()
    assert (rank.bytes_of(5) == 52).all()
    assert (rank.bytes_of(6) == 50).all()


def test_chunks_are_found_after_a_restart(tmp_path: Path) -> None:
    before = Rank(tmp_path)
    before.fill(0, 7)
    before.do(Move.DEMOTE, KEYS[:2], [0, 1])
    before.close()
    after = Rank(tmp_path)
    assert set(after.disk.found) == set(KEYS[:2])
    assert after.do(Move.PROMOTE, KEYS[:1], [4]).failed == frozenset()
    assert (after.bytes_of(4) == 7).all()
    after.close()


def test_forgotten_chunk_is_not_found_again(tmp_path: Path) -> None:
    before = Rank(tmp_path)
    before.do(Move.DEMOTE, KEYS[:2], [0, 1])
    before.disk.carry_out(Order(99, Move.FORGET, (KEYS[0], KEYS[9])))
    assert before.do(Move.PROMOTE, KEYS[:2], [2, 3]).failed == {0}
    before.close()
    after = Rank(tmp_path)
    assert after.disk.found == (KEYS[1],)
    after.close()


def test_chunk_that_is_not_there_fails_and_the_others_do_not(rank: Rank) -> None:
    rank.do(Move.DEMOTE, KEYS[:1], [0])
    assert rank.do(Move.PROMOTE, [KEYS[5], KEYS[0]], [1, 2]).failed == {0}


def test_evicted_chunks_make_room(rank: Rank) -> None:
    assert rank.do(Move.DEMOTE, KEYS[:6], [0, 1, 2, 3, 4, 5]).failed == frozenset()
    assert rank.do(Move.DEMOTE, KEYS[6:8], [6, 7]).failed == {0, 1}, "the disk is full"
    assert rank.do(Move.DEMOTE, KEYS[6:8], [6, 7], KEYS[:1]).failed == {1}
    assert rank.do(Move.PROMOTE, KEYS[:1], [0]).failed == {0}
    assert rank.do(Move.PROMOTE, KEYS[6:7], [0]).failed == frozenset()


def test_damaged_chunk_is_not_given_back(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.fill(0, 9)
    rank.do(Move.DEMOTE, KEYS[:2], [0, 1])
    with (tmp_path / "data.slab").open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    assert rank.do(Move.PROMOTE, KEYS[:2], [2, 3]).failed == {0}
    rank.close()


def test_disk_that_was_read_says_how_fast_it_is(rank: Rank) -> None:
    assert rank.disk.take_probe() is None
    rank.do(Move.DEMOTE, KEYS[:2], [0, 1])
    assert rank.disk._probe is not None
    rank.disk._probe.wait()
    probe = rank.disk.take_probe()
    assert probe is not None
    assert (probe.num_bytes, probe.seconds > 0) == (2 * SIZE, True)
    assert rank.disk.take_probe() is None, "told once"


def test_disk_that_refuses_writes_fails_them_and_nothing_else(tmp_path: Path) -> None:
    system = FaultyDisk()
    rank = Rank(tmp_path, system=system)
    assert rank.do(Move.DEMOTE, KEYS[:1], [0]).failed == frozenset()
    system.fail("write", code=errno.ENOSPC, count=100)
    for at in range(1, 5):
        assert rank.do(Move.DEMOTE, KEYS[at : at + 1], [at]).failed == {0}
    rank.do(Move.PROMOTE, KEYS[:1], [7])  # a miss or a hit, and never an error
    rank.tier.check_invariants()
    rank.close()


@pytest.mark.parametrize("slots", [[0, 8], [-1, 0], [2**40, 0], [0], [0, 1, 2]], ids=str)
def test_order_about_memory_that_is_not_there_fails_and_touches_nothing(
    rank: Rank, slots: list[int]
) -> None:
    for slot in range(2):
        rank.fill(slot, slot + 1)
    before = rank.bytes_of(0).tobytes()
    assert rank.do(Move.DEMOTE, KEYS[:2], slots).failed == {0, 1}
    assert rank.tier.num_used == 0
    assert not rank.do(Move.DEMOTE, KEYS[:2], [0, 1]).failed
    assert rank.do(Move.PROMOTE, KEYS[:2], slots).failed == {0, 1}
    assert rank.bytes_of(0).tobytes() == before
    assert not rank.do(Move.PROMOTE, KEYS[:2], [6, 7]).failed
    assert (rank.bytes_of(6) == 1).all()
    assert (rank.bytes_of(7) == 2).all()
