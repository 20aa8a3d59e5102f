"""One choice: text and tokens are emitted together, in order, and cut at the same place."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.serve.engine import Detokenizer, Token
from kvtier.serve.server.choice import AnswerChoice, TextToken

from .test_stops import STOPS, naive

pytestmark = pytest.mark.engine


class Scripted:
    """A detokenizer that returns the n-th text for token n."""

    def __init__(self, texts: list[str], last: str = "") -> None:
        self._texts = texts
        self._last = last

    def push(self, token_id: int) -> str:
        return self._texts[token_id]

    def flush(self) -> str:
        return self._last


def run(texts: list[str], last: str, stops: list[str]) -> tuple[str, list[TextToken], str | None]:
    choice = AnswerChoice(cast(Detokenizer, Scripted(texts, last)), stops)
    pieces = [choice.push(Token(at, -1.0)) for at in range(len(texts))]
    pieces.append(choice.finish("length"))
    assert all(piece.finish_reason is None for piece in pieces[:-1])
    text = "".join(piece.text for piece in pieces)
    tokens = [token for piece in pieces for token in piece.tokens]
    return text, tokens, pieces[-1].finish_reason


@given(
    texts=st.lists(st.text("ab", max_size=3), max_size=10),
    last=st.text("ab", max_size=2),
    stops=STOPS,
)
def test_text_and_tokens_end_at_the_first_stop(
    texts: list[str], last: str, stops: list[str]
) -> None:
    text, tokens, reason = run(texts, last, stops)
    whole = "".join(texts) + last
    assert text == naive(whole, stops)
    was_cut = any(stop in whole for stop in stops)
    assert reason == ("stop" if was_cut else "length")
    offsets = [sum(map(len, texts[:at])) for at in range(len(texts))]
    expected = [at for at, offset in enumerate(offsets) if not was_cut or offset < len(text)]
    assert [token.token.token_id for token in tokens] == expected
    assert [token.offset for token in tokens] == [offsets[at] for at in expected]


def test_tokens_wait_for_their_text() -> None:
    choice = AnswerChoice(cast(Detokenizer, Scripted(["a", "E", "b"])), ["END"])
    held = [choice.push(Token(at, -1.0)) for at in range(3)]
    assert [(piece.text, len(piece.tokens)) for piece in held] == [("a", 1), ("", 0), ("Eb", 2)]


def test_tokens_after_a_stop_do_not_count() -> None:
    choice = AnswerChoice(cast(Detokenizer, Scripted(["a", "x", "b"])), ["x"])
    for at in range(3):
        choice.push(Token(at, -1.0))
    assert choice.stopped
    assert choice.num_tokens == 2
    assert choice.finish("abort").finish_reason == "stop"


def test_the_prefix_comes_before_the_first_text_and_has_no_stops() -> None:
    choice = AnswerChoice(cast(Detokenizer, Scripted(["a", "b"])), ["x"], prefix="x ")
    assert choice.push(Token(0, -1.0)).text == "x a"
    assert choice.push(Token(1, -1.0)).text == "b"
