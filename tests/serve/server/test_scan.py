"""The scan of a body counts the objects that a parser would build, however the body is cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.serve.server.errors import ApiError
from kvtier.serve.server.scan import Bounds, Scan

TEXTS = st.text(st.sampled_from('ab"\\[]{},:0 \u00e9\u2222\U0001f600\n'), max_size=12)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)
CUTS = st.lists(st.integers(0, 400), max_size=8)


def scan(body: bytes, cuts: list[int], bounds: Bounds) -> None:
    made = Scan(bounds)
    places = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    for begin, end in pairwise(places):
        made.add(body[begin:end])


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from strings(each)


def shape(value: object) -> tuple[int, int, int]:
    """Return (containers, depth, commas)."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [shape(each) for each in (value.values() if isinstance(value, dict) else value)]
    return (
        1 + sum(each[0] for each in inner),
        1 + max((each[1] for each in inner), default=0),
        max(0, len(inner) - 1) + sum(each[2] for each in inner),
    )


@given(value=VALUES, cuts=CUTS, is_ascii=st.booleans())
def test_a_body_passes_exactly_within_its_bounds(
    value: object, cuts: list[int], is_ascii: bool
) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    written = [json.dumps(string, ensure_ascii=is_ascii).encode() for string in strings(value)]
    longest = max((len(each) - 2 for each in written), default=0)
    containers, depth, commas = shape(value)
    exact = {
        "text_bytes": longest,
        "containers": containers,
        "depth": depth,
        "values": commas + 1,
    }
    scan(body, cuts, Bounds(**exact))
    for name, sentence in (
        ("text_bytes", "a text of more than"),
        ("containers", "lists and objects; send"),
        ("depth", "levels of lists and objects"),
        ("values", "values; send"),
    ):
        if exact[name] > (name == "values"):
            with pytest.raises(ApiError, match=sentence):
                scan(body, cuts, Bounds(**{**exact, name: exact[name] - 1}))


@pytest.mark.parametrize("number", ["7" * 65, "0." + "3" * 63, "-1e" + "9" * 62])
@pytest.mark.parametrize("cuts", [[], [5, 40]])
def test_a_number_of_too_many_characters_is_refused(number: str, cuts: list[int]) -> None:
    bounds = Bounds(text_bytes=1000)
    with pytest.raises(ApiError, match="a number of more than 64 characters"):
        scan(f'[1, {number}, "x"]'.encode() * 2, [], bounds)
    scan(f'[1, {number[:-1]}, "{number}"]'.encode(), cuts, bounds)


@given(junk=st.binary(max_size=200), cuts=CUTS)
def test_what_is_no_json_does_not_break_the_scan(junk: bytes, cuts: list[int]) -> None:
    scan(junk, cuts, Bounds(text_bytes=1000, depth=300))
