"""JSON schemas of clients, as grammars of answers: some tokens that follow one, or a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

pytest.importorskip("llguidance")

from kvtier.serve.engine import GrammarError, Tokenizer
from kvtier.serve.engine.grammar import Grammars
from kvtier.serve.engine.model_names import BUILTIN
from kvtier.serve.server.fields import parse_response_format
from kvtier.serve.server.grammars import grammar_of_answer
from tests.fuzz.mutations import mutate

OUTCOMES = frozenset({"followed", "refused"})
CPU_S = 10.0
WALL_S = 120.0
NUM_TOKENS = 20
VOCAB_SIZE = 8192
GRAMMARS = Grammars(Tokenizer(BUILTIN / "kvtier-tiny").own, VOCAB_SIZE, [1])

SCHEMAS: tuple[dict[str, object], ...] = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 200},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b", 1, None]}, "maxItems": 5},
            "when": {"type": "string", "format": "date-time"},
            "size": {"type": "number", "multipleOf": 0.5},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    },
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"$ref": "#/$defs/node"}, "value": {"const": "x"}},
            }
        },
        "anyOf": [{"$ref": "#/$defs/node"}, {"type": ["string", "null"]}],
    },
    {"type": "string", "pattern": "^[a-z]{1,20}$"},
    {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"type": "integer"}},
    {"oneOf": [{"type": "integer"}, {"type": "object", "patternProperties": {"^x": {}}}]},
)
ATOMS = (
    "a",
    ".",
    r"\w",
    r"\d",
    "[^x]",
    r"\p{L}",
    "é",
    "a|b",
    "",
    "(?=a)",
    r"\b",
    "$",
    "^",
    "[",
    "\\",
)
TIMES = "", "*", "+", "?", "{3}", "{1000}", "{0,30000}", "{2,}", "{1000000}", "{5,2}"


def attempt(rng: Random, folder: Path) -> str:
    """Compile a schema, and follow it for some tokens."""
    schema: object = rng.choice(SCHEMAS)
    for _ in range(rng.choice((0, 1, 2, 4))):
        schema = mutate(schema, rng)
    if isinstance(schema, dict):
        schema = rng.choice(CHANGES)(schema, rng)
    given = json.loads(json.dumps({"type": "json_schema", "json_schema": {"schema": schema}}))
    try:
        wanted = parse_response_format(given)
    except ValueError as error:
        return _refused(error)
    try:
        grammar = GRAMMARS.compile(grammar_of_answer(wanted))
    except GrammarError as error:
        return _refused(error)
    matcher = grammar.matcher()
    for _ in range(NUM_TOKENS):
        allowed = np.flatnonzero(matcher.allowed(VOCAB_SIZE))
        if matcher.is_complete or not len(allowed):
            break
        matcher.accept(int(rng.choice(allowed)))
    assert matcher.error.isprintable()
    return "followed"


def _refused(error: Exception) -> str:
    sentence = str(error)
    assert sentence.isprintable(), sentence
    assert len(sentence) < 400, sentence
    return "refused"


def _same(schema: dict[str, object], rng: Random) -> dict[str, object]:
    return schema


def _pattern(schema: dict[str, object], rng: Random) -> dict[str, object]:
    """Return a schema with any regular expression."""
    made = ""
    for _ in range(rng.randrange(1, 6)):
        made = rng.choice(("{}", "({})", "({}|{})", "[{}]", "{}{}")).replace(
            "{}", made + rng.choice(ATOMS) + rng.choice(TIMES)
        )[:300]
    key = rng.choice(("pattern", "pattern", "format"))
    return {"type": "object", "properties": {"a": {"type": "string", key: f"^{made}$"}}}


def _nested(schema: dict[str, object], rng: Random) -> dict[str, object]:
    """Return a schema inside many others."""
    for _ in range(rng.choice((2, 20, 60))):
        kind = rng.choice(("array", "object", "anyOf", "allOf", "not"))
        if kind == "array":
            schema = {"type": "array", "items": schema, "minItems": rng.choice((0, 1, 100))}
        elif kind == "object":
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        else:
            schema = {kind: schema if kind == "not" else [schema, {"type": "integer"}]}
    return schema


def _large(schema: dict[str, object], rng: Random) -> dict[str, object]:
    """Return a schema with many alternatives, properties or characters."""
    num = rng.choice((10, 300, 2000))
    made: list[dict[str, object]] = [
        {"enum": [rng.random() for _ in range(num)]},
        {"anyOf": [{**schema, "title": str(at)} for at in range(min(num, 300))]},
        {"type": "object", "properties": {f"p{at}": schema for at in range(min(num, 300))}},
        {"type": "string", "minLength": num * 100, "maxLength": num * 1000},
        {"type": "array", "items": schema, "minItems": num * 10, "maxItems": num * 20},
        {"type": "number", "minimum": -(10.0**num) if num < 300 else 0, "exclusiveMaximum": 7},
    ]
    return rng.choice(made)


CHANGES = _same, _pattern, _nested, _large
