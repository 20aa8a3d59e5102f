"""Tokens as text: the streamed pieces of an answer join to the decoded text, after any prompt."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.serve.engine.model_names import BUILTIN
from kvtier.serve.engine.tokenizer import Tokenizer
from tests.serve.engine.checkpoints import save_sentencepiece

pytestmark = pytest.mark.engine


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "byte-level":
        return Tokenizer(BUILTIN / "kvtier-tiny")
    with TemporaryDirectory() as folder:
        save_sentencepiece(Path(folder))
        return Tokenizer(Path(folder))


KINDS = pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])


def streamed(tokenizer: Tokenizer, before: list[int], token_ids: list[int]) -> list[str]:
    stream = tokenizer.detokenizer(before)
    return [*(stream.push(token_id) for token_id in token_ids), stream.flush()]


@KINDS
@given(before=st.text(max_size=20), text=st.text(max_size=40))
def test_text_goes_on_behind_a_prompt_as_if_decoded_at_once(
    kind: str, before: str, text: str
) -> None:
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer.encode(f"x{before}")
    token_ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, prompt, token_ids)
    whole = tokenizer.decode(prompt + token_ids)
    assert tokenizer.decode(prompt) + "".join(pieces) == whole
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 4095), max_size=40))
def test_streamed_text_of_any_tokens_is_the_decoded_text(token_ids: list[int]) -> None:
    tokenizer = tokenizer_of("byte-level")
    assert "".join(streamed(tokenizer, [], token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("specials", [[], [1], [1, 2, 1]])
def test_a_blank_stays_behind_special_tokens(specials: list[int]) -> None:
    tokenizer = tokenizer_of("sentencepiece")
    hello, harness = tokenizer.encode("hello"), tokenizer.encode("harness")
    assert "".join(streamed(tokenizer, hello + specials, harness)) == " harness"
    assert "".join(streamed(tokenizer, hello, harness + specials + harness)) == " harness harness"
    assert "".join(streamed(tokenizer, specials, hello)) == "hello"  # the beginning of a text
    assert tokenizer.token_text(harness[0]) == " harness"


def byte_tokens(kind: str, tokenizer: Tokenizer, text: bytes) -> list[int]:
    """Return a token for each byte, from a byte-level vocabulary."""
    if kind == "sentencepiece":
        names = [f"<0x{byte:02X}>" for byte in text]
        found = tokenizer.own.convert_tokens_to_ids(names)
        assert isinstance(found, list)
        return found
    ids = range(tokenizer.vocab_size)
    by_bytes = {tokenizer.token(each).part: each for each in ids if tokenizer.token(each).part}
    return [by_bytes[bytes([byte])] for byte in text]


@KINDS
def test_bytes_that_become_no_character_are_given_up_after_three(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    grin, dead = "😀".encode(), b"\xf0\x9f\x98"
    tokens = byte_tokens(kind, tokenizer, grin + dead + grin + b"\x80" * 300 + dead)
    stream = tokenizer.detokenizer()
    pieces = [stream.push(token_id) for token_id in tokens]
    assert pieces[:11] == ["", "", "", "😀", "", "", "", "\ufffd", "", "", "😀"]
    assert pieces[11:311] == ["\ufffd"] * 300
    assert [*pieces[311:], stream.flush()] == ["", "", "", "\ufffd"]


@KINDS
def test_a_token_is_decoded_a_few_times_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(kind)
    decode, num_decoded = tokenizer.decode, [0]

    def counting(token_ids: list[int]) -> str:
        num_decoded[0] += len(token_ids)
        return decode(token_ids)

    monkeypatch.setattr(tokenizer, "decode", counting)
    tokens = byte_tokens(kind, tokenizer, b"\xe4") + tokenizer.encode("harness") + [1]
    streamed(tokenizer, [], tokens * 500)
    assert num_decoded[0] < 10 * 500 * len(tokens)
