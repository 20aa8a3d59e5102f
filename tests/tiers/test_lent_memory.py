"""Memory of somebody else's, lent slot by slot."""

from __future__ import annotations

import pytest

from kvtier.layout import named_layout, opaque
from kvtier.testing import host_memory
from kvtier.tiers import LentMemory
from kvtier.types import HOST, Slot

ROW_BYTES = 64


@pytest.fixture
def rows() -> LentMemory:
    layout = named_layout("block_first", opaque(ROW_BYTES), 4)
    return LentMemory(HOST, host_memory(4 * ROW_BYTES), layout)


def test_slots_are_used_from_lending_to_freeing(rows: LentMemory) -> None:
    rows.lend([Slot(3), Slot(1)])
    assert (rows.num_used, rows.num_open) == (2, 4)
    rows.free([Slot(3)])
    assert rows.num_used == 1


def test_nobody_is_given_a_slot_that_was_not_lent(rows: LentMemory) -> None:
    assert rows.allocate(1) is None
    assert rows.allocate(0) == []
    assert (rows.num_free, rows.longest_run()) == (0, 0)


def test_blocks_lie_where_their_owner_has_them(rows: LentMemory) -> None:
    pieces = rows.pieces([Slot(2), Slot(0)])
    assert (pieces.addresses[:, 0] - rows.memory.address).tolist() == [2 * ROW_BYTES, 0]
    assert pieces.block_bytes == ROW_BYTES


def test_slot_is_lent_once_and_given_back_once(rows: LentMemory) -> None:
    rows.lend([Slot(0)])
    with pytest.raises(AssertionError, match="lent twice"):
        rows.lend([Slot(0)])
    rows.free([Slot(0)])
    with pytest.raises(AssertionError, match="not lent"):
        rows.free([Slot(0)])
    with pytest.raises(AssertionError, match="not there"):
        rows.lend([Slot(-1)])


def test_memory_stays_with_its_owner(rows: LentMemory) -> None:
    rows.close()
    rows.pieces([Slot(0)]).write(0, b"x" * ROW_BYTES)
