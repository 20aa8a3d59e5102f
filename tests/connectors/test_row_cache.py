"""The keyed cache over rows that the engine lends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.assembly import build_ladder
from kvtier.connectors.common.row_cache import RowCache
from kvtier.index import make_key_index
from kvtier.ladder import LadderOptions
from kvtier.layout import named_layout, opaque
from kvtier.testing import MemoryStorage, StoredBlocks, host_memory
from kvtier.tiers import LentMemory
from kvtier.transfer import LocalMover
from kvtier.types import DISK, HOST, Slot

ROW_BYTES = 64
GROUP = opaque(ROW_BYTES)
NUM_ROWS = 16


class World:
    """Rows above a storage tier with room for three blocks."""

    def __init__(self) -> None:
        layout = named_layout("block_first", GROUP, NUM_ROWS)
        self.rows = LentMemory(HOST, host_memory(NUM_ROWS * ROW_BYTES), layout)
        self.storage = MemoryStorage(GROUP, 3, StoredBlocks())
        tiers = {HOST: self.rows, DISK: self.storage}
        index = make_key_index(tuple(tiers), lambda: b"n" * 32)
        self.ladder = build_ladder(
            index,
            tiers,
            LocalMover(tiers, None, clock=lambda: 0.0),
            LadderOptions(ROW_BYTES),
            clock=lambda: 0.0,
        )
        self.cache = RowCache(self.rows, index, self.ladder, lambda: b"n" * 32, lambda: 0.0)

    def place(self, *keys: bytes) -> None:
        self.cache.place(keys, [Slot(row) for row in range(len(keys))], range(len(keys)))

    def settle(self) -> None:
        while self.ladder.is_busy:
            self.ladder.transfers.wait(60)
            self.cache.poll()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.settle()
    made.cache.check_invariants()
    made.ladder.close()


def test_start_of_a_prompt_is_written_as_the_one_used_last(world: World) -> None:
    world.place(b"1", b"2", b"3")
    world.settle()
    world.cache.displace([b"1", b"2", b"3"])
    world.cache.take_changes()
    world.place(b"9")
    (left,) = world.cache.take_changes()
    assert (left.keys, left.is_removed) == ([b"3"], True)


def test_what_is_placed_stays_in_storage_until_it_is_displaced(world: World) -> None:
    world.place(b"1", b"2", b"3")
    world.settle()
    world.cache.place([b"9"], [Slot(7)], [0])
    assert not world.cache.is_moving(b"9"), "there was no room for it"
    world.cache.displace([b"1", b"2", b"3", b"9"])
    assert world.rows.num_used == 0
    world.place(b"9")
    assert world.cache.is_moving(b"9")


def test_rows_of_what_did_not_arrive_are_not_lent_any_more(world: World) -> None:
    world.place(b"1", b"2")
    world.settle()
    world.cache.displace([b"1", b"2"])
    world.storage.unreachable = True
    world.cache.fetch([b"1", b"2"], [Slot(4), Slot(5)])
    assert world.cache.is_moving(b"1")
    world.settle()
    assert not world.cache.is_moving(b"1")
    assert not world.cache.standing([b"1"]).in_memory[0]
    assert world.cache.is_stored(b"1"), "a read that failed says nothing about the block"
    assert world.rows.num_used == 0
