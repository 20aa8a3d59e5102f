"""The rules of the index, one by one."""

from __future__ import annotations

import pytest

from kvtier.index import BlockIndex, State
from kvtier.index.policies import LruPolicy
from kvtier.types import DEVICE, HOST, BlockId, Outcome, Slot

NS = b"namespace"


class Filled:
    """An index of two tiers, with shorthand to put paths into it."""

    def __init__(self) -> None:
        self.index = BlockIndex({DEVICE: LruPolicy(), HOST: LruPolicy()})
        self._next = 0

    def put(self, labels: str, tier: str = DEVICE, namespace: bytes = NS) -> list[BlockId]:
        """Make every block of the path ready in ``tier``, where it is not."""
        blocks = self.index.extend(namespace, self.labels(labels))
        for block in blocks:
            if self.index.state(block, tier) is State.ABSENT:
                self.begin(block, tier)
                self.index.commit(block, tier, float(self._next))
        return blocks

    def begin(self, block: BlockId, tier: str = DEVICE) -> None:
        self.index.begin_write(block, tier, Slot(self._next))
        self._next += 1

    def evict(self, tier: str = DEVICE, num_blocks: int = 99) -> list[BlockId]:
        chosen = self.index.evict(tier, num_blocks)
        for block in chosen:
            self.index.forget(block, tier)
        self.index.check_invariants()
        return chosen

    def matched(self, labels: str, namespace: bytes = NS) -> int:
        return self.index.match(namespace, self.labels(labels)).num_blocks

    @staticmethod
    def labels(labels: str) -> list[bytes]:
        return [label.encode() for label in labels]


@pytest.fixture
def filled() -> Filled:
    return Filled()


def test_longest_prefix_is_matched(filled: Filled) -> None:
    filled.put("abcd")
    assert filled.matched("abcd") == 4
    assert filled.matched("abxd") == 2
    assert filled.matched("abcdef") == 4
    assert filled.matched("xabcd") == 0
    assert filled.matched("") == 0


def test_outcomes_are_told_apart(filled: Filled) -> None:
    blocks = filled.put("ab", HOST)
    match = filled.index.match(NS, filled.labels("ab"))
    assert match.outcome is Outcome.HIT
    assert match.tiers == (HOST, HOST)
    assert filled.index.match(NS, filled.labels("x")).outcome is Outcome.MISS
    filled.begin(blocks[1], DEVICE)
    match = filled.index.match(NS, filled.labels("ab"))
    assert match.outcome is Outcome.IN_FLIGHT
    assert match.in_flight == (False, True)
    assert match.first(1).outcome is Outcome.HIT
    assert match.on_device().num_blocks == 0


def test_block_that_is_being_written_is_not_matched(filled: Filled) -> None:
    (block,) = filled.index.extend(NS, [b"a"])
    filled.begin(block)
    assert filled.matched("a") == 0
    filled.index.commit(block, DEVICE, 1.0)
    assert filled.matched("a") == 1


def test_leased_block_survives_eviction(filled: Filled) -> None:
    blocks = filled.put("abc")
    filled.index.lease(blocks[:2], DEVICE)
    assert filled.evict() == [blocks[2]]
    assert filled.matched("abc") == 2
    filled.index.release(blocks[:2], DEVICE)
    assert filled.evict() == [blocks[1], blocks[0]]
    assert len(filled.index) == 0


def test_block_leased_twice_has_to_be_released_twice(filled: Filled) -> None:
    blocks = filled.put("a")
    filled.index.lease(blocks, DEVICE)
    filled.index.lease(blocks, DEVICE)
    filled.index.release(blocks, DEVICE)
    assert filled.evict() == []
    filled.index.release(blocks, DEVICE)
    assert filled.evict() == blocks
    with pytest.raises(KeyError):
        filled.index.release(blocks, DEVICE)


def test_releasing_more_often_than_leasing_is_noticed(filled: Filled) -> None:
    blocks = filled.put("a")
    with pytest.raises(AssertionError, match="released more often"):
        filled.index.release(blocks, DEVICE)


def test_lease_holds_in_one_tier_only(filled: Filled) -> None:
    blocks = filled.put("a", DEVICE)
    filled.put("a", HOST)
    filled.index.lease(blocks, HOST)
    assert filled.evict(DEVICE) == blocks
    assert filled.evict(HOST) == []
    assert filled.matched("a") == 1


def test_only_leaves_are_evicted_within_a_tier(filled: Filled) -> None:
    a, b, c = filled.put("abc")
    (_, _, d) = filled.put("abd")
    filled.index.touch([c, d], 100.0)
    assert filled.evict(num_blocks=1) == [c], "the oldest leaf leaves, though its parents are older"
    assert filled.evict(num_blocks=2) == [d, b]
    assert filled.evict() == [a]


def test_block_used_last_leaves_last(filled: Filled) -> None:
    blocks = [filled.put(label)[0] for label in "abc"]
    for label in "abc":
        filled.put(label, HOST)
    filled.index.touch(blocks[:1], 100.0)
    assert filled.evict(DEVICE) == [blocks[1], blocks[2], blocks[0]]
    assert filled.evict(HOST) == [blocks[1], blocks[2], blocks[0]], "a use counts in every tier"


def test_leaf_of_one_tier_may_have_children_in_another(filled: Filled) -> None:
    a, b = filled.put("ab", HOST)
    filled.index.begin_write(a, DEVICE, Slot(50))
    filled.index.commit(a, DEVICE, 1.0)
    assert filled.evict(DEVICE) == [a]
    assert filled.evict(HOST) == [b, a]


def test_block_being_written_keeps_its_parent(filled: Filled) -> None:
    a = filled.put("a")[0]
    b = filled.index.extend(NS, [b"a", b"b"])[1]
    filled.begin(b)
    assert filled.evict() == []
    filled.index.abort(b, DEVICE)
    assert filled.evict() == [a]


def test_blocks_on_their_way_are_not_counted_as_evictable(filled: Filled) -> None:
    filled.put("ab")
    c = filled.index.extend(NS, filled.labels("xyz"))[2]
    filled.begin(c)
    assert filled.index.num_held(DEVICE) == 3
    assert filled.index.num_evictable(DEVICE) == 2
    filled.index.commit(c, DEVICE, 1.0)
    assert filled.index.num_evictable(DEVICE) == 3


def test_block_that_is_leaving_is_not_matched_until_it_is_kept(filled: Filled) -> None:
    filled.put("ab")
    chosen = filled.index.evict(DEVICE, 1)
    assert filled.matched("ab") == 1
    filled.index.keep(chosen[0], DEVICE)
    assert filled.matched("ab") == 2
    assert filled.index.evict(DEVICE, 1) == chosen


def test_match_stops_at_a_hole_and_finds_the_tail_again(filled: Filled) -> None:
    blocks = filled.put("abcd")
    filled.index.lease([blocks[3]], DEVICE)
    # What leaves out of order: a parent that was chosen stays absent while its child is kept.
    filled.index.release([blocks[3]], DEVICE)
    chosen = filled.index.evict(DEVICE, 3)
    assert chosen == [blocks[3], blocks[2], blocks[1]]
    filled.index.keep(blocks[3], DEVICE)
    filled.index.keep(blocks[2], DEVICE)
    filled.index.forget(blocks[1], DEVICE)
    filled.index.check_invariants()
    assert filled.matched("abcd") == 1
    assert filled.put("ab") == blocks[:2], "the same blocks, by number"
    assert filled.matched("abcd") == 4
    filled.index.check_invariants()


def test_hole_may_be_filled_from_another_tier(filled: Filled) -> None:
    a, b, c = filled.put("abc", DEVICE)
    filled.put("ab", HOST)
    for block in filled.index.evict(DEVICE, 3):
        if block == c:
            filled.index.keep(block, DEVICE)
        else:
            filled.index.forget(block, DEVICE)
    match = filled.index.match(NS, filled.labels("abc"))
    assert match.blocks == (a, b, c)
    assert match.tiers == (HOST, HOST, DEVICE)


def test_prefixes_are_the_nearest_ready_blocks_above(filled: Filled) -> None:
    blocks = filled.put("abcdef")
    filled.put("ab", HOST)
    other = filled.put("xy", DEVICE)
    assert filled.index.prefixes(blocks[2:], HOST) == [blocks[1]]
    assert filled.index.prefixes([blocks[5]], HOST) == [blocks[1]]
    assert filled.index.prefixes([blocks[5]], DEVICE) == [blocks[4]]
    assert filled.index.prefixes(other, HOST) == []
    assert filled.index.prefixes([blocks[0], blocks[3], other[1]], DEVICE) == [blocks[2], other[0]]


def test_namespaces_never_share_a_block(filled: Filled) -> None:
    one = filled.put("abc", namespace=b"one")
    assert filled.matched("abc", namespace=b"two") == 0
    two = filled.put("abc", namespace=b"two")
    assert set(one).isdisjoint(two)
    assert filled.index.key(one[2]) != filled.index.key(two[2])


def test_nothing_is_left_of_what_was_evicted(filled: Filled) -> None:
    for namespace in (b"one", b"two"):
        filled.put("abc", namespace=namespace)
    filled.evict()
    assert len(filled.index) == 0
    assert filled.index._trie.num_roots == 0


def test_a_path_of_no_blocks_leaves_nothing_behind(filled: Filled) -> None:
    assert filled.index.extend(NS, []) == []
    assert filled.index._trie.num_roots == 0


def test_numbers_are_never_used_twice(filled: Filled) -> None:
    before = filled.put("ab")
    filled.evict()
    assert set(before).isdisjoint(filled.put("ab"))
    assert filled.index.state(before[0], DEVICE) is State.ABSENT


def test_illegal_moves_are_noticed(filled: Filled) -> None:
    (block,) = filled.put("a")
    with pytest.raises(AssertionError, match="no move from READY to WRITING"):
        filled.index.begin_write(block, DEVICE, Slot(9))
    with pytest.raises(AssertionError, match="lease on"):
        filled.index.lease([block], HOST)
    filled.index.lease([block], DEVICE)
    with pytest.raises(AssertionError, match="no move from READY to ABSENT"):
        filled.index.forget(block, DEVICE)
