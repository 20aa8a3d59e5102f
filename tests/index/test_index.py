"""The rules of the index, one by one."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from kvtier.core.keys import grid_labels, token_labels, view_labels
from kvtier.core.types import DEVICE, DISK, HOST, BlockId, Slot
from kvtier.index import PromptIndex, State
from tests.index.indexes import INDEXES, Both, make

NS = b"namespace"


class Filled:
    """An index of two tiers, with shorthand to put paths into it."""

    def __init__(self, index: PromptIndex) -> None:
        self.index = index
        self._next = 0

    def put(self, labels: str, tier: str = DEVICE, namespace: bytes = NS) -> Sequence[BlockId]:
        """Make every block of the path ready in ``tier``, where it is not."""
        blocks = self.index.extend(namespace, self.labels(labels))
        for block in blocks:
            if self.index.state(block, tier) is State.ABSENT:
                self.begin(block, tier)
                self.index.commit([block], tier, float(self._next))
        return blocks

    def begin(self, block: BlockId, tier: str = DEVICE) -> None:
        self.index.begin_write([block], tier, [Slot(self._next)])
        self._next += 1

    def evict(self, tier: str = DEVICE, num_blocks: int = 99) -> Sequence[BlockId]:
        chosen = self.index.evict(tier, num_blocks)
        self.index.forget(chosen, tier)
        self.index.check_invariants()
        return chosen

    def matched(self, labels: str, namespace: bytes = NS) -> int:
        return self.index.match(namespace, self.labels(labels)).num_blocks

    def matched_labels(self, labels: Sequence[bytes]) -> int:
        return self.index.match(NS, labels).num_blocks

    @staticmethod
    def labels(labels: str) -> list[bytes]:
        return [label.encode() for label in labels]


@pytest.fixture(params=INDEXES)
def filled(request: pytest.FixtureRequest) -> Filled:
    return Filled(make(request.param, (DEVICE, HOST)))


def test_longest_prefix_is_matched(filled: Filled) -> None:
    filled.put("abcd")
    assert filled.matched("abcd") == 4
    assert filled.matched("abxd") == 2
    assert filled.matched("abcdef") == 4
    assert filled.matched("xabcd") == 0
    assert filled.matched("") == 0


def test_match_tells_ready_from_in_flight(filled: Filled) -> None:
    blocks = filled.put("ab", HOST)
    match = filled.index.match(NS, filled.labels("ab"))
    assert match.in_flight == (False, False)
    assert match.tiers == (HOST, HOST)
    filled.begin(blocks[1], DEVICE)
    match = filled.index.match(NS, filled.labels("ab"))
    assert match.in_flight == (False, True)
    assert match.first(1).in_flight == (False,)
    assert match.on_device().num_blocks == 0


def test_block_that_is_being_written_is_not_matched(filled: Filled) -> None:
    (block,) = filled.index.extend(NS, [b"a"])
    filled.begin(block)
    assert filled.matched("a") == 0
    filled.index.commit([block], DEVICE, 1.0)
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
    filled.index.begin_write([a], DEVICE, [Slot(50)])
    filled.index.commit([a], DEVICE, 1.0)
    assert filled.evict(DEVICE) == [a]
    assert filled.evict(HOST) == [b, a]


def test_block_being_written_keeps_its_parent(filled: Filled) -> None:
    a = filled.put("a")[0]
    b = filled.index.extend(NS, [b"a", b"b"])[1]
    filled.begin(b)
    assert filled.evict() == []
    filled.index.abort([b], DEVICE)
    assert filled.evict() == [a]


def test_blocks_on_their_way_are_not_counted_as_evictable(filled: Filled) -> None:
    filled.put("ab")
    c = filled.index.extend(NS, filled.labels("xyz"))[2]
    filled.begin(c)
    assert filled.index.num_held(DEVICE) == 3
    assert filled.index.num_evictable(DEVICE) == 2
    filled.index.commit([c], DEVICE, 1.0)
    assert filled.index.num_evictable(DEVICE) == 3


def test_block_that_is_leaving_is_not_matched_until_it_is_kept(filled: Filled) -> None:
    filled.put("ab")
    chosen = filled.index.evict(DEVICE, 1)
    assert filled.matched("ab") == 1
    filled.index.keep([chosen[0]], DEVICE)
    assert filled.matched("ab") == 2
    assert filled.index.evict(DEVICE, 1) == chosen


def test_match_stops_at_a_hole_and_finds_the_tail_again(filled: Filled) -> None:
    blocks = filled.put("abcd")
    filled.index.lease([blocks[3]], DEVICE)
    # Evicted out of order: a chosen parent stays absent while its child is kept.
    filled.index.release([blocks[3]], DEVICE)
    chosen = filled.index.evict(DEVICE, 3)
    assert chosen == [blocks[3], blocks[2], blocks[1]]
    filled.index.keep(blocks[2:], DEVICE)
    filled.index.forget([blocks[1]], DEVICE)
    filled.index.check_invariants()
    assert filled.matched("abcd") == 1
    assert filled.put("ab") == blocks[:2], "the same blocks, by number"
    assert filled.matched("abcd") == 4
    filled.index.check_invariants()


def test_hole_may_be_filled_from_another_tier(filled: Filled) -> None:
    a, b, c = filled.put("abc", DEVICE)
    filled.put("ab", HOST)
    assert filled.index.evict(DEVICE, 3) == [c, b, a]
    filled.index.keep([c], DEVICE)
    filled.index.forget([b, a], DEVICE)
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
    assert filled.index.num_namespaces == 0


def test_a_path_of_no_blocks_leaves_nothing_behind(filled: Filled) -> None:
    assert filled.index.extend(NS, []) == []
    assert filled.index.num_namespaces == 0


def test_numbers_are_never_used_twice(filled: Filled) -> None:
    before = filled.put("ab")
    filled.evict()
    assert set(before).isdisjoint(filled.put("ab"))
    assert filled.index.state(before[0], DEVICE) is State.ABSENT


def test_illegal_moves_are_noticed(filled: Filled) -> None:
    (block,) = filled.put("a")
    with pytest.raises(AssertionError, match="no move from READY to WRITING"):
        filled.index.begin_write([block], DEVICE, [Slot(9)])
    with pytest.raises(AssertionError, match="lease on"):
        filled.index.lease([block], HOST)
    filled.index.lease([block], DEVICE)
    with pytest.raises(AssertionError, match="no move from READY to ABSENT"):
        filled.index.forget([block], DEVICE)


# -- whole paths in one call -----------------------------------------------------------------------


def slots(*numbers: int) -> list[Slot]:
    return [Slot(number) for number in numbers]


def test_inserted_path_is_ready_and_keeps_the_slots_it_had(filled: Filled) -> None:
    before = filled.put("ab")
    made = filled.index.insert(NS, filled.labels("abcd"), DEVICE, slots(7, 8, 9, 10), 5.0)
    assert made.blocks[:2] == before
    assert made.slots == slots(0, 1, 9, 10), "two slots are the caller's again"
    assert made.num_new == 2
    assert filled.matched("abcd") == 4
    filled.index.check_invariants()
    assert filled.evict() == made.blocks[::-1]


def test_insert_ends_before_a_block_on_its_way(filled: Filled) -> None:
    filled.put("a")
    b = filled.index.extend(NS, filled.labels("ab"))[1]
    filled.begin(b)
    made = filled.index.insert(NS, filled.labels("abc"), DEVICE, slots(7, 8, 9), 5.0)
    assert (len(made.blocks), made.slots, made.num_new) == (1, slots(0), 0)
    assert len(filled.index) == 2, "nothing was made below"
    filled.index.check_invariants()


def test_insert_below_a_block_holds_what_it_made(filled: Filled) -> None:
    a = filled.put("a")[0]
    made = filled.index.insert(NS, filled.labels("bc"), HOST, slots(8, 9), 5.0, a, hold=True)
    assert filled.matched("abc") == 3
    assert filled.evict(HOST) == []
    filled.index.release(made.blocks, HOST)
    assert filled.evict(HOST) == made.blocks[::-1]


def test_insert_fills_a_hole(filled: Filled) -> None:
    blocks = filled.put("abc")
    chosen = filled.index.evict(DEVICE, 2)
    filled.index.keep([chosen[0]], DEVICE)
    filled.index.forget([chosen[1]], DEVICE)
    assert filled.matched("abc") == 1
    made = filled.index.insert(NS, filled.labels("ab"), DEVICE, slots(7, 8), 5.0)
    assert made.num_new == 1
    assert filled.matched("abc") == 3
    filled.index.check_invariants()
    assert filled.evict() == blocks[::-1]


def test_a_path_of_no_blocks_inserts_nothing(filled: Filled) -> None:
    assert filled.index.insert(NS, [], DEVICE, [], 1.0) == ([], [], 0)
    assert filled.index.num_namespaces == 0


def test_slots_of_the_prefix_that_one_tier_has_ready(filled: Filled) -> None:
    filled.put("ab")
    filled.put("abc", HOST)
    ours = filled.index.match_slots(NS, filled.labels("abcd"), DEVICE)
    assert ours.tolist() == [0, 1]
    assert filled.index.match_slots(NS, filled.labels("abcd"), HOST).tolist() == [2, 3, 4]
    assert filled.index.match_slots(NS, filled.labels("xyz"), HOST).tolist() == []
    assert filled.index.match_slots(b"other", filled.labels("ab"), HOST).tolist() == []
    assert ours.dtype == "int64"
    assert not ours.flags.writeable


def test_many_blocks_in_one_call_are_as_one_after_another(filled: Filled) -> None:
    blocks = filled.index.extend(NS, filled.labels("abc"))
    filled.index.begin_write(blocks, DEVICE, slots(4, 5, 6))
    assert filled.index.states_of(blocks, DEVICE) == [State.WRITING] * 3
    assert filled.index.abort(blocks[2:], DEVICE) == slots(6)
    filled.index.commit(blocks[:2], DEVICE, 1.0)
    assert filled.index.states_of(blocks, DEVICE) == [State.READY, State.READY, State.ABSENT]
    assert filled.index.slots(blocks[:2], DEVICE) == slots(4, 5)
    chosen = filled.index.evict(DEVICE, 2)
    assert filled.index.forget(chosen, DEVICE) == slots(5, 4)
    assert len(filled.index) == 0


def test_blocks_may_come_from_an_iterator(filled: Filled) -> None:
    """An iterator, which can be read once, is accepted."""
    index = filled.index
    blocks = index.extend(NS, filled.labels("abc"))
    index.begin_write(iter(blocks), DEVICE, iter(slots(4, 5, 6)))
    assert index.abort(iter(blocks[2:]), DEVICE) == slots(6)
    index.commit(iter(blocks[:2]), DEVICE, 1.0)
    index.touch(iter(blocks[:2]), 2.0)
    index.lease(iter(blocks[:2]), DEVICE)
    assert index.num_held(DEVICE) == 2
    index.release(iter(blocks[:2]), DEVICE)
    assert index.slots(iter(blocks[:2]), DEVICE) == slots(4, 5)
    assert index.forget(iter(index.evict(DEVICE, 2)), DEVICE) == slots(5, 4)
    assert len(index) == 0


def test_a_late_commit_is_no_use(filled: Filled) -> None:
    """Committing a block that was used since its write began does not count as a use."""
    index = filled.index
    old, new, untouched = (index.extend(b"late", [label])[0] for label in (b"o", b"n", b"u"))
    for slot, block in enumerate((old, new, untouched), start=100):
        index.begin_write([block], DEVICE, [Slot(slot)])
    index.touch([old], 1001.0)
    index.touch([new], 1002.0)
    index.commit([new], DEVICE, 1003.0)
    index.commit([untouched], DEVICE, 1004.0)
    index.commit([old], DEVICE, 1005.0)
    order = [block for block in index.evict(DEVICE, 99) if block in (old, new, untouched)]
    assert order == [old, new, untouched]


def test_what_is_dropped_gives_its_slots_back(filled: Filled) -> None:
    filled.put("abc")
    filled.put("ab", HOST)
    assert filled.index.drop(DEVICE, 2) == slots(2, 1)
    assert filled.matched("abc") == 2
    assert filled.index.drop(DEVICE, 9) == slots(0)
    assert filled.index.drop(DEVICE, 9) == []
    filled.index.check_invariants()


# -- labels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [2, 6])
def test_labels_over_tokens_name_the_blocks_that_their_bytes_name(
    filled: Filled, chunk_tokens: int
) -> None:
    labels = grid_labels(range(100, 119), 2, chunk_tokens)
    num_blocks = len(labels)
    made = filled.index.insert(NS, labels[:4], DEVICE, slots(*range(4)), 1.0)
    rest = slots(*range(4, num_blocks))
    filled.index.insert(NS, labels[4:], DEVICE, rest, 1.0, made.blocks[-1])
    assert filled.index.match(NS, list(labels)) == filled.index.match(NS, labels)
    assert filled.index.match_slots(NS, list(labels), DEVICE).tolist() == list(range(num_blocks))
    assert filled.index.states(NS, labels[4:6], DEVICE, made.blocks[-1]) == [State.READY] * 2
    assert [node.label for node in filled.index.nodes()] == list(labels)
    other = grid_labels([*range(100, 110), *range(9)], 2, chunk_tokens)
    assert filled.matched_labels(other) == 10 // chunk_tokens * chunk_tokens // 2


@pytest.mark.parametrize("kind", ["q", "i", "I", "Q"])
def test_tokens_are_read_where_they_lie(filled: Filled, kind: str) -> None:
    tokens = array(kind, range(1000, 1700))
    labels = view_labels(tokens, 4)
    filled.index.insert(NS, labels, DEVICE, slots(*range(175)), 1.0)
    assert [node.label for node in filled.index.nodes()] == list(token_labels(tokens, 4))
    for known in (0, 1, 15, 16, 17, 63, 64, 80, 81, 174):
        other = array(kind, tokens)
        other[4 * known] += 1
        assert filled.matched_labels(view_labels(other, 4)) == known
    assert filled.matched_labels(labels[:100]) == 100
    below = filled.index.extend(NS, labels[:40])[-1]
    assert filled.index.states(NS, labels[40:], DEVICE, below) == [State.READY] * 135
    tokens.extend(range(4))  # no reference keeps the array's memory alive
    assert filled.matched_labels(view_labels(np.array(tokens), 4)) == 175


@pytest.mark.parametrize("block_size", [1, 3, 8, 13, 16, 40])
@pytest.mark.parametrize("kind", ["q", "i", "I", "Q"])
def test_blocks_of_any_size_are_compared_to_the_last_id(
    filled: Filled, kind: str, block_size: int
) -> None:
    tokens = array(kind, range(7 * block_size))
    filled.index.insert(NS, view_labels(tokens, block_size), DEVICE, slots(*range(7)), 1.0)
    for changed in range(len(tokens)):
        other = array(kind, tokens)
        other[changed] += 1
        assert filled.matched_labels(view_labels(other, block_size)) == changed // block_size
    assert filled.matched_labels(view_labels(tokens, block_size)) == 7


@pytest.mark.parametrize(("kind", "wrong"), [("q", 5 + 2**32), ("q", 5 - 2**32), ("i", -1)])
def test_an_id_out_of_range_is_never_taken_for_one_with_the_same_low_bits(
    filled: Filled, kind: str, wrong: int
) -> None:
    known = [0, 1, 2, 3, 4, wrong % 2**32, 6, 7]
    filled.index.insert(NS, token_labels(known, 4), DEVICE, slots(0, 1), 1.0)
    tokens = array(kind, [0, 1, 2, 3, 4, wrong, 6, 7])
    with pytest.raises(ValueError, match=r"0 \.\. 2\*\*32 - 1"):
        filled.index.match(NS, view_labels(tokens, 4))


def test_ids_out_of_range_are_refused_before_anything_changes(filled: Filled) -> None:
    tokens = array("q", range(8))
    for wrong in (-1, 2**32):
        tokens[5] = wrong
        with pytest.raises(ValueError, match=r"0 \.\. 2\*\*32 - 1"):
            filled.index.extend(NS, view_labels(tokens, 4))
        filled.evict()
    filled.index.check_invariants()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 31, 32, 33, 100, 300_000])
def test_label_may_have_any_length(filled: Filled, length: int) -> None:
    labels = [bytes(length), b"x" + bytes(length), bytes(length + 1)]
    filled.index.insert(NS, labels, DEVICE, slots(0, 1, 2), 1.0)
    assert filled.matched_labels(labels) == 3
    assert filled.matched_labels([labels[0], bytes(length + 1)]) == 1
    assert [node.label for node in filled.index.nodes()] == labels


def test_place_of_a_label_is_used_again_for_another(filled: Filled) -> None:
    for first in range(4):
        labels = token_labels(range(first, first + 40), 4)
        filled.index.insert(NS, labels, DEVICE, slots(*range(10)), float(first))
        assert filled.matched_labels(labels) == 10
        assert filled.matched_labels(token_labels(range(first + 1, first + 41), 4)) == 0
        assert len(filled.evict()) == 10


# -- misuse ----------------------------------------------------------------------------------------


def test_unknown_names_are_refused(filled: Filled) -> None:
    (block,) = filled.put("a")
    with pytest.raises(KeyError):
        filled.index.slots([BlockId(block + 1)], DEVICE)
    with pytest.raises(KeyError):
        filled.index.extend(NS, [b"x"], BlockId(99))
    with pytest.raises(KeyError):
        filled.index.num_held(DISK)


@pytest.mark.parametrize("kind", INDEXES)
def test_an_index_has_as_many_tiers_as_it_is_given(kind: str) -> None:
    tiers = tuple(f"tier {number}" for number in range(8))
    index = make(kind, tiers)
    for number, tier in enumerate(tiers[::-1]):
        index.insert(NS, [b"a", b"b"], tier, slots(0, 1), float(number))
        assert index.match(NS, [b"a", b"b"]).tiers == (tier, tier)
    index.check_invariants()
    for tier in tiers:
        assert len(index.forget(index.evict(tier, 2), tier)) == 2
        index.check_invariants()
    assert len(index) == 0


def test_both_indexes_agree_on_thousands_of_blocks() -> None:
    """So many that memory, hash table and queue have to grow, and places are reused."""
    both = Both((DEVICE, HOST))
    rng = random.Random(1)
    heads = [[rng.randrange(9) for _ in range(300)] for _ in range(4)]
    next_slot = 0
    for now in range(120):
        tokens = [*rng.choice(heads)[: rng.randrange(300)], *rng.choices(range(99), k=400)]
        labels = token_labels(tokens, 4)
        given = slots(*range(next_slot, next_slot + len(labels)))
        next_slot += len(labels)
        made = both.insert(NS, labels, rng.choice([DEVICE, HOST]), given, float(now // 3))
        both.touch(made.blocks[: rng.randrange(100)], float(now // 3))
        both.match(NS, labels)
        if now % 5 == 4:
            both.drop(rng.choice([DEVICE, HOST]), rng.randrange(600))
            both.check_invariants()
    assert len(both) > 4096, "more than a chunk of the arena"
    assert both.drop(DEVICE, 10**6)
    assert both.drop(HOST, 10**6)
    assert len(both) == 0
    both.check_invariants()
