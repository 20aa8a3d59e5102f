"""Positions at which a prompt may be cut if several pools must agree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.connectors.sglang.shared.prefix_hits import SidePool, common_hits

Flags = st.lists(st.booleans(), max_size=12)


def test_pool_that_needs_all_pages_ends_at_the_first_gap() -> None:
    assert SidePool([True, True, False, True]).cuts(4) == [1, 2]


def test_pool_that_needs_the_last_pages_has_cuts_behind_a_gap() -> None:
    assert SidePool([False, True, True, False, True, True], num_last=2).cuts(6) == [3, 6]
    assert SidePool([True, False, True], num_last=1).cuts(3) == [1, 3]


def test_common_cuts_are_those_that_every_pool_has() -> None:
    sides = {"swa": SidePool([True, False, True], 1), "indexer": SidePool([True, True, True])}
    hits = common_hits(("kv", 3), sides)
    assert (list(hits.cuts), hits.longest) == ([1, 3], 3)
    assert hits.by_pool == {"kv": 3, "swa": 3, "indexer": 3}


def test_pool_with_nothing_leaves_nothing() -> None:
    hits = common_hits(("kv", 3), {"mamba": SidePool([False] * 3, 1)})
    assert (list(hits.cuts), hits.longest, hits.by_pool) == ([], 0, {"kv": 3})
    assert common_hits(("kv", 0), {}).by_pool == {}


@given(Flags, st.integers(0, 5), st.integers(0, 12))
def test_cuts_are_what_the_words_say(are_there: list[bool], num_last: int, num: int) -> None:
    num = min(num, len(are_there))
    expected = [
        length
        for length in range(1, num + 1)
        if all(are_there[max(0, length - num_last) if num_last else 0 : length])
    ]
    assert SidePool(are_there, num_last).cuts(num) == expected
