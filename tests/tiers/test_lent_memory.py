"""Memory of another owner, lent block by block."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.core.types import HOST
from kvtier.testing import host_memory
from kvtier.tiers import LentMemory, Pieces

SIZES = np.array([16, 48])
OWNER = host_memory(4 * 64)


@pytest.fixture
def memory() -> LentMemory:
    return LentMemory(HOST, SIZES, 4)


def blocks(*rows: int) -> Pieces:
    return Pieces.whole([OWNER.address + 64 * row for row in rows], 64).cut(SIZES)


def test_slots_are_used_from_lending_to_freeing(memory: LentMemory) -> None:
    slots = memory.lend(blocks(3, 1))
    assert (memory.num_used, memory.num_open) == (2, 4)
    memory.free(slots[:1])
    assert memory.num_used == 1


def test_only_the_owner_adds_slots(memory: LentMemory) -> None:
    assert memory.allocate(1) is None
    assert memory.allocate(0) == []
    assert (memory.num_free, memory.longest_run()) == (0, 0)


def test_blocks_lie_where_their_owner_has_them(memory: LentMemory) -> None:
    slots = memory.lend(blocks(2, 0))
    pieces = memory.pieces(slots)
    begins = [OWNER.address + 128, OWNER.address]
    assert pieces.addresses.tolist() == [[begin, begin + 16] for begin in begins]
    assert pieces.block_bytes == 64


def test_more_or_other_blocks_than_agreed_are_a_mistake(memory: LentMemory) -> None:
    memory.lend(blocks(0, 1, 2))
    with pytest.raises(AssertionError, match="more blocks"):
        memory.lend(blocks(0, 1))
    with pytest.raises(AssertionError, match="another shape"):
        memory.lend(Pieces(blocks(0).addresses, SIZES[::-1]))


def test_memory_stays_with_its_owner(memory: LentMemory) -> None:
    slots = memory.lend(blocks(0))
    memory.close()
    memory.pieces(slots).write(0, b"x" * 64)
