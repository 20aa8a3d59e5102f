"""Parses request fields that have several forms into one. Errors are whole sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)

from kvtier.hints import (
    HIGHEST_PRIORITY,
    MAX_BACK_S,
    MAX_RANGES,
    MAX_TTL_S,
    Hint,
    KvHints,
    parse_hint,
    parse_kv_hints,
)
from kvtier.server.errors import show

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024

Prompt = str | list[int]
"""One prompt: text, or token ids."""


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_text(name: str, text: str) -> None:
    """Refuse half of a surrogate pair, which JSON can carry but no text can."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has half of a surrogate pair at character {error.start}; send whole characters"
        ) from error


def parse_prompts(value: object) -> list[Prompt]:
    """Return the prompts of a completion request: text or token ids, one or many."""
    prompts: list[Prompt]
    if isinstance(value, str):
        prompts = [value]
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        prompts = list(value)
    elif isinstance(value, list) and value and _is_token_ids(value):
        prompts = [value]
    elif isinstance(value, list) and value and all(_is_token_ids(item) for item in value):
        prompts = list(value)
    else:
        raise ValueError(
            f"prompt is {show(value)}, but must be a text, a list of texts, a list of token ids or "
            "a list of lists of token ids"
        )
    for prompt in prompts:
        if not prompt:
            raise ValueError("prompt is empty; give at least one token")
        if isinstance(prompt, str):
            _check_text("prompt", prompt)
    return prompts


def parse_stops(value: object) -> tuple[str, ...]:
    """Return the stop strings: none, one, or up to four."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"stop is {show(value)}, but must be a text or a list of texts")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"stop has {len(stops)} texts; give at most {MAX_STOPS}")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise ValueError(
                f"stop has a text of {len(stop)} characters; give 1 to {MAX_STOP_CHARACTERS} each"
            )
        _check_text("stop", stop)
    return tuple(stops)


def parse_content(value: object) -> str:
    """Return the text of a message: a string, or a list of text parts."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise ValueError(f"content is {show(value)}, but must be a text or a list of text parts")
    texts: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise ValueError(
                f"content has a part of type {show(kind)}; this server reads "
                '{"type": "text", "text": "..."} only'
            )
        _check_text("content", text)
        texts.append(text)
    return "".join(texts)


def parse_hinted(value: object) -> Hint | None:
    """Parse the hints of a client; null means none."""
    return None if value is None else parse_hint(value)


def _check_field(value: str, info: ValidationInfo) -> str:
    _check_text(info.field_name or "a text", value)
    return value


def none_is(default: object) -> BeforeValidator:
    """Return a validator that replaces null by the default."""
    return BeforeValidator(lambda value: default if value is None else value)


_TOKEN_IDS: dict[str, object] = {"type": "array", "items": {"type": "integer"}}
_TEXTS: dict[str, object] = {"type": "array", "items": {"type": "string"}}

Text = Annotated[str, Field(strict=True), AfterValidator(_check_field)]
Prompts = Annotated[
    list[Prompt],
    PlainValidator(parse_prompts),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, _TEXTS, _TOKEN_IDS, {"type": "array", "items": _TOKEN_IDS}]}
    ),
]
Stops = Annotated[
    Sequence[str],
    PlainValidator(parse_stops),
    WithJsonSchema({"anyOf": [{"type": "string"}, {**_TEXTS, "maxItems": MAX_STOPS}]}),
]
Content = Annotated[
    str,
    PlainValidator(parse_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]
_RANGE: dict[str, object] = {
    "type": "object",
    "required": ["priority"],
    "properties": {
        "first_token": {"type": "integer"},
        "last_token": {"type": "integer"},
        "priority": {"type": "integer", "minimum": 0, "maximum": HIGHEST_PRIORITY},
        "ttl_s": {"type": "number", "maximum": MAX_TTL_S},
    },
}
Orchestrated = Annotated[
    KvHints,
    PlainValidator(parse_kv_hints),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "protocol_version": {"type": "string"},
                "message_id": {"type": "string"},
                "actions": {"type": "array", "items": {"type": "object"}},
            },
        }
    ),
]
Hinted = Annotated[
    Hint | None,
    PlainValidator(parse_hinted),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "retain": {"type": "array", "items": _RANGE, "maxItems": MAX_RANGES},
                "back_in_s": {"type": "number", "maximum": MAX_BACK_S},
                "ended": {"type": "boolean"},
            },
        }
    ),
]
