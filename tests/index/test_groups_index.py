"""The rules of an index with several groups of layers, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.index import ALL, PromptIndex, ReuseRule, State
from kvtier.keys import token_labels
from kvtier.types import DEVICE, HOST, BlockId, Column, GroupMatch, Slot
from tests.index.indexes import INDEXES, make

NS = b"namespace"
WINDOW = Column(DEVICE, 1)
STATE = Column(DEVICE, 2)
COLUMNS = (DEVICE, WINDOW, STATE)


@pytest.fixture(params=INDEXES)
def index(request: pytest.FixtureRequest) -> PromptIndex:
    """Full attention, a window of two blocks, and a recurrent state."""
    return make(request.param, (DEVICE, HOST), (ALL, ReuseRule(2), ReuseRule(1)))


def labels(path: str) -> list[bytes]:
    return [label.encode() for label in path]


def put(
    index: PromptIndex, path: str, *columns: str | Column, now: float = 1.0
) -> Sequence[BlockId]:
    """The whole path is ready in each of the columns; block i in slot i."""
    slots = [Slot(at) for at in range(len(path))]
    for column in columns:
        blocks = index.insert(NS, labels(path), column, slots, now).blocks
    return blocks


def match(index: PromptIndex, path: str) -> GroupMatch:
    return index.match_groups(NS, labels(path))


def test_a_cut_counts_where_every_group_has_what_it_needs(index: PromptIndex) -> None:
    blocks = put(index, "abcdef", DEVICE)
    assert match(index, "abcdef").cuts == ()
    assert match(index, "abcdef").num_blocks == 0
    put(index, "abcd", WINDOW)
    put(index, "abcdef", Column(HOST, 2))
    for column, lost in ((WINDOW, 1), (Column(HOST, 2), 2)):
        index.lose(blocks[lost], column)
    found = match(index, "abcdef")
    assert found.cuts == (1, 4)
    assert found.blocks == tuple(blocks[:4]), "what lies behind the last cut is of no use"
    assert found.tiers == (
        (DEVICE,) * 4,
        (DEVICE, None, DEVICE, DEVICE),
        (HOST, HOST, None, HOST),
    )
    index.check_invariants()


def test_what_full_attention_lacks_ends_every_cut_behind_it(index: PromptIndex) -> None:
    blocks = put(index, "abcd", *COLUMNS)
    index.lose(blocks[2], DEVICE)
    assert match(index, "abcd").cuts == (1, 2)
    assert match(index, "abxd").cuts == (1, 2)


def test_blocks_on_their_way_are_told_by_group(index: PromptIndex) -> None:
    blocks = put(index, "ab", *COLUMNS[:2], Column(HOST, 2))
    index.begin_write(blocks[1], STATE, Slot(9))
    found = match(index, "ab")
    assert found.cuts == (1, 2)
    assert found.in_flight == ((False,) * 2, (False,) * 2, (False, True))


def test_a_block_in_the_middle_leaves_where_its_children_do_without(index: PromptIndex) -> None:
    blocks = put(index, "abcd", *COLUMNS)
    assert index.evict(DEVICE, 1) == [blocks[3]]
    assert index.evict(WINDOW, 1) == [blocks[0]]
    index.lease([blocks[1]], STATE)
    assert index.evict(STATE, 9) == [blocks[0], blocks[2], blocks[3]]
    assert index.state(blocks[2], WINDOW) is State.READY
    index.check_invariants()


def test_a_use_is_one_of_the_blocks_that_its_cut_needs(index: PromptIndex) -> None:
    """Blocks that a window has moved past leave first, however often the prompt comes."""
    blocks = put(index, "abcd", *COLUMNS)
    other = put(index, "xy", *COLUMNS, now=2.0)
    index.touch(blocks, 3.0)
    assert index.evict(WINDOW, 9) == [*blocks[:2], *other, *blocks[2:]]
    assert index.evict(STATE, 9) == [*blocks[:3], *other, blocks[3]]
    assert index.evict(DEVICE, 9) == [*other[::-1], *blocks[::-1]]
    assert index.num_uses_of(blocks) == [1] * 4


def test_a_block_is_known_as_long_as_some_column_or_a_longer_prefix_needs_it(
    index: PromptIndex,
) -> None:
    blocks = put(index, "ab", *COLUMNS)
    for column in COLUMNS[:2]:
        assert len(index.drop(column, 9)) == 2
    index.lease(blocks[1:], STATE)
    assert index.drop(STATE, 9) == [Slot(0)]
    assert len(index) == 2, "the state behind it needs its place"
    index.release(blocks[1:], STATE)
    assert index.drop(STATE, 9) == [Slot(1)]
    assert len(index) == 0
    assert index.num_namespaces == 0


def test_the_first_group_has_two_names(index: PromptIndex) -> None:
    put(index, "ab", Column(DEVICE, 0))
    assert index.num_held(DEVICE) == index.num_held(Column(DEVICE, 0)) == 2
    assert index.columns[:3] == (DEVICE, HOST, Column(DEVICE, 1))


@pytest.mark.parametrize("kind", INDEXES)
def test_a_model_without_full_attention_goes_on_past_any_hole(kind: str) -> None:
    index = make(kind, (DEVICE,), (ReuseRule(1),))
    tokens = token_labels(range(40), 4)
    made = index.insert(NS, tokens, DEVICE, [Slot(at) for at in range(10)], 1.0)
    for at in (0, 1, 2, 4, 5, 6, 8):
        index.lose(made.blocks[at], DEVICE)
    assert index.match_groups(NS, tokens).cuts == (4, 8, 10)
    with pytest.raises(AssertionError, match="ask match_groups"):
        index.match(NS, tokens)
