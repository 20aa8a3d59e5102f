"""Stop strings: the matcher against a naive cut of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.serve.server.choice import StopMatcher

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def naive(text: str, stops: list[str]) -> str:
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places, default=len(text))]


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
@example(pieces=["ab", "a"], stops=["b", "aba"])  # the later stop is complete first
@example(pieces=["ab", "b"], stops=["b", "aba"])
def test_any_chunking_gives_the_text_before_the_first_stop(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    given_out = [matcher.push(piece) for piece in pieces]
    given_out.append(matcher.flush())
    text = "".join(pieces)
    assert "".join(given_out) == naive(text, stops)
    assert matcher.stopped == any(stop in text for stop in stops)


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_only_what_may_become_a_stop_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher, text, given_out = StopMatcher(stops), "", ""
    for piece in pieces:
        text += piece
        given_out += matcher.push(piece)
        held = naive(text, stops)[len(given_out) :]
        if not matcher.stopped and not any(stop in text for stop in stops):
            assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("pieces", [["one END two"], ["one E", "N", "D two"], list("one END two")])
def test_a_stop_across_pieces_is_found(pieces: list[str]) -> None:
    matcher = StopMatcher(["END"])
    assert "".join(matcher.push(piece) for piece in pieces) == "one "
    assert matcher.stopped


def test_nothing_follows_a_stop() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("ax") == "a"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""
