"""Grammars of answers: allowed and rejected tokens, and the cost for other requests."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtier.serve.engine import Engine, Grammar, GrammarError, SamplingParams

pytestmark = pytest.mark.engine

GREEDY = SamplingParams(max_tokens=40)
WORDS = '%llguidance {}\nstart: ("yes" | "no") "."'


def of_schema(schema: object) -> str:
    return f"%llguidance {{}}\nstart: a\na: %json {json.dumps(schema)}"


def texts_of(tiny: Engine, grammar: Grammar, **changes: Any) -> list[str]:
    prompt = tiny.tokenizer.encode("Is it so? ")
    asked = replace(GREEDY, grammar=grammar, **changes)
    handles = [tiny.submit(prompt, replace(asked, seed=seed)) for seed in range(4)]
    done = [handle.result(60) for handle in handles]
    assert {each.finish_reason for each in done} == {"stop"}
    return [tiny.tokenizer.decode(each.token_ids) for each in done]


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_requests_share_a_grammar_and_each_has_its_own_place(
    tiny: Engine, temperature: float
) -> None:
    found = texts_of(tiny, tiny.grammar(WORDS), temperature=temperature)
    assert set(found) <= {"yes.", "no."}


def test_a_matcher_allows_what_continues_the_grammar_and_nothing_else(tiny: Engine) -> None:
    matcher = tiny.grammar(WORDS).matcher()
    vocab_size = tiny.info.vocab_size
    text = ""
    for token_id in tiny.tokenizer.encode("yes."):
        is_allowed = matcher.allowed(vocab_size)
        expected = [
            bool(piece) and any(word.startswith(text + piece) for word in ("yes.", "no."))
            for piece in map(tiny.tokenizer.token_text, range(vocab_size))
        ]
        if text:  # the word is fixed, and only the tokenizer's own spelling of it is allowed
            assert is_allowed[token_id]
            assert (is_allowed <= np.array(expected)).all()
        else:
            assert is_allowed.tolist() == expected
        matcher.accept(token_id)
        text += tiny.tokenizer.token_text(token_id)
    assert matcher.is_complete
    assert not matcher.error


def test_an_end_is_allowed_where_the_grammar_may_end(tiny: Engine) -> None:
    matcher = tiny.grammar('%llguidance {}\nstart: "a"+').matcher()
    ends = list(tiny._eos)
    assert not matcher.allowed(4096)[ends].any()
    matcher.accept(tiny.tokenizer.encode("a")[0])
    assert matcher.allowed(4096)[ends].all()
    assert not matcher.is_complete
    matcher.accept(ends[0])
    assert matcher.is_complete


def test_a_wrong_token_is_an_error_of_its_matcher_only(tiny: Engine) -> None:
    grammar = tiny.grammar(WORDS)
    wrong, right = grammar.matcher(), grammar.matcher()
    wrong.accept(tiny.tokenizer.encode("x")[0])
    assert wrong.error
    assert not wrong.allowed(4096).any()
    assert not right.error
    assert right.allowed(4096).any()


HOSTILE: list[tuple[object, str]] = [
    ({"type": "objec"}, "Invalid type"),
    ({"type": "integer", "multipleOf": 999_999_937}, "more than the 100000 remainders"),
    ({"type": "integer", "multipleOf": 999_983}, "more than the 100000 remainders"),
    (
        {"allOf": [{"type": "integer", "multipleOf": part} for part in (0, 997, 991)]},
        "more than the 100000 remainders",
    ),
    ({"$ref": "file:///etc/passwd"}, "is not present in a registry"),
    ({"$ref": "http://127.0.0.1:1/schema.json"}, "is not present in a registry"),
    (
        {
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}_{j}": {}}} for i in range(8)]} for j in range(8)
            ]
        },
        "schema too large",
    ),
    ({"type": "string", "pattern": "^(a{1000}){1000}$"}, "too many expressions constructed$"),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "string", "pattern": "^(a{999}){999}$"}},
            "required": ["a"],
        },
        "too many expressions constructed$",
    ),
    ({"enum": [f"{at:08}" for at in range(20_000)]}, "of 131072 that are compiled at most"),
]


@pytest.mark.parametrize(("schema", "sentence"), HOSTILE)
def test_a_schema_that_would_cost_too_much_is_refused(
    tiny: Engine, schema: object, sentence: str
) -> None:
    with pytest.raises(GrammarError, match=sentence) as caught:
        tiny.grammar(of_schema(schema))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 200


LARGE: list[object] = [
    {"enum": [f"{at * 7919 % 100_003:05}-{at:05}" for at in range(8_000)]},
    {
        "type": "object",
        "properties": {f"p{at}": {"type": "string", "format": "date-time"} for at in range(300)},
    },
    {"type": "array", "maxItems": 5000, "items": {"type": "string", "maxLength": 5000}},
    {"anyOf": [{"type": "number", "multipleOf": part} for part in (0.01, 0.25, 86400, 1e6)]},
]


@pytest.mark.parametrize("schema", LARGE)
def test_a_large_schema_stays_within_the_limits(tiny: Engine, schema: object) -> None:
    matcher = tiny.grammar(of_schema(schema)).matcher()
    for _ in range(50):
        allowed = np.flatnonzero(matcher.allowed(4096))
        assert not matcher.error
        if matcher.is_complete:
            break
        matcher.accept(int(allowed[len(allowed) // 2]))


class Exhausted:
    """A grammar that allows one token and then fails, as when its library gives up."""

    error = "too complex"
    is_complete = False

    def __init__(self) -> None:
        self._num = 0

    def matcher(self) -> Exhausted:
        return Exhausted()

    def allowed(self, vocab_size: int) -> Any:
        found = np.zeros(vocab_size, np.bool_)
        found[70] = self._num == 0
        return found

    def accept(self, token_id: int) -> None:
        self._num += 1
        self.error = "too complex"


def test_a_grammar_that_gives_up_ends_its_request_only(tiny: Engine) -> None:
    prompt = tiny.tokenizer.encode("import os\n" * 4)
    expected = tiny.submit(prompt, GREEDY).result(60).token_ids
    other = tiny.submit(prompt, GREEDY)
    grammar: Any = Exhausted()
    ended = tiny.submit(prompt, replace(GREEDY, grammar=grammar)).result(60)
    assert ended.finish_reason == "error"
    assert ended.error == "The request failed: too complex"
    assert len(other.result(60).token_ids) == len(expected)
    assert tiny.submit(prompt, GREEDY).result(60).token_ids == expected
