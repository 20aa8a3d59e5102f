"""Blocks that are held for a while."""

from __future__ import annotations

from kvtier.cache.holds import Holds
from kvtier.core.types import Slot
from kvtier.index import make_key_index
from kvtier.index.policies.replayed import LRU

TIERS = ("host", "disk")


class Harness:
    """An index with blocks 0 to 7 in storage."""

    def __init__(self, most: int = 8) -> None:
        self.index = make_key_index(dict.fromkeys(TIERS, LRU), lambda: b"n" * 32)
        self.index.expect(16)
        self.blocks = self.index.make([b"%032d" % number for number in range(8)])
        self.index.begin_write(self.blocks, "disk", [Slot(at) for at in range(8)])
        self.index.commit(self.blocks, "disk", 0.0)
        self.holds = Holds(self.index, "disk", most)

    def num_leases(self) -> list[int]:
        return [self.index.num_leases(block, "disk") for block in self.blocks]


def test_hold_ends_when_its_time_is_over() -> None:
    harness = Harness()
    harness.holds.hold(harness.blocks[:2], 10.0)
    harness.holds.hold(harness.blocks[2:3], 11.0)
    harness.holds.expire(9.9)
    assert harness.num_leases() == [1, 1, 1, 0, 0, 0, 0, 0]
    harness.holds.expire(10.1)
    assert harness.num_leases() == [0, 0, 1, 0, 0, 0, 0, 0]


def test_block_that_is_held_again_stays_until_the_later_time() -> None:
    harness = Harness()
    harness.holds.hold(harness.blocks[:1], 10.0)
    harness.holds.hold(harness.blocks[:1], 20.0)
    harness.holds.expire(15.0)
    assert harness.num_leases()[0] == 1
    harness.holds.expire(25.0)
    assert harness.num_leases()[0] == 0


def test_what_is_let_go_is_not_released_twice() -> None:
    harness = Harness()
    harness.holds.hold(harness.blocks[:2], 10.0)
    harness.holds.release(harness.blocks[0], 2)
    assert len(harness.holds) == 0
    harness.holds.expire(20.0)
    harness.holds.clear()
    assert harness.num_leases() == [0] * 8
    harness.index.check_invariants()


def test_what_one_has_read_stays_for_the_other_who_was_told() -> None:
    harness = Harness()
    harness.holds.hold(harness.blocks[:2], 10.0)
    harness.holds.hold(harness.blocks[:3], 11.0)
    harness.holds.release(harness.blocks[0], 2)
    assert harness.num_leases()[:3] == [1, 1, 1]
    harness.holds.release(harness.blocks[0], 3)
    assert harness.num_leases()[:3] == [0, 0, 0]


def test_what_is_read_in_parts_is_let_go_in_parts() -> None:
    harness = Harness()
    harness.holds.hold(harness.blocks, 10.0)
    harness.holds.release(harness.blocks[0], 3)
    assert harness.num_leases() == [0, 0, 0, 1, 1, 1, 1, 1]
    harness.holds.release(harness.blocks[3], 4)
    assert harness.num_leases() == [0] * 7 + [1]
    harness.holds.release(harness.blocks[3], 4)  # nobody was told
    harness.holds.expire(10.0)
    assert harness.num_leases() == [0] * 8
    harness.index.check_invariants()


def test_no_more_than_the_most_are_held() -> None:
    harness = Harness(most=3)
    harness.holds.hold(harness.blocks, 10.0)
    assert harness.num_leases() == [1, 1, 1, 0, 0, 0, 0, 0]
    harness.holds.clear()
    assert harness.num_leases() == [0] * 8
