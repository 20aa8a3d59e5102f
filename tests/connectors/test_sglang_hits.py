"""Positions at which a prompt may be cut if several pools must agree."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.connectors.sglang.shared.prefix_hits import common_cuts, side_cuts

Flags = st.lists(st.booleans(), max_size=12)


@given(Flags, st.integers(0, 5), st.integers(0, 12))
@example([True, True, False, True], 0, 4)
@example([False, True, True, False, True, True], 2, 6)
def test_cuts_are_what_the_words_say(are_there: list[bool], num_last: int, num: int) -> None:
    num = min(num, len(are_there))
    expected = [
        length
        for length in range(1, num + 1)
        if all(are_there[max(0, length - num_last) if num_last else 0 : length])
    ]
    assert side_cuts(are_there, num_last, num) == expected


def test_common_cuts_are_those_that_every_pool_has() -> None:
    assert common_cuts(3, {}) == range(1, 4)
    assert common_cuts(3, {"swa": [1, 3, 4], "indexer": [1, 2, 3]}) == [1, 3]
    assert common_cuts(3, {"mamba": []}) == []
