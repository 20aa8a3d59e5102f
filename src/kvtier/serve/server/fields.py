"""Parses request fields that have several forms into one. Errors are whole sentences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)

from kvtier.core.hints import (
    HIGHEST_PRIORITY,
    MAX_BACK_S,
    MAX_RANGES,
    MAX_TTL_S,
    Hint,
    KvHints,
    parse_hint,
    parse_kv_hints,
)
from kvtier.serve.server.errors import show

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_ALL_STOP_CHARACTERS = 4096
"""Each piece of an answer is compared with all beginnings of all stop strings."""

MAX_BIAS = 100
MAX_STOP_IDS = 64
MAX_TOOL_NAME = 128


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    parameters: JSON schema of its arguments.
    given: as the client sent it; chat templates render that.
    """

    name: str
    parameters: dict[str, object]
    given: dict[str, object]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Calls that are wanted.

    mode: none, auto or required.
    name: of the only one that is.
    """

    mode: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """JSON schema of the answer."""

    schema: dict[str, object]


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
    """Return the stop strings: none, one, or several."""
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
    if (num_characters := sum(map(len, stops))) > MAX_ALL_STOP_CHARACTERS:
        raise ValueError(
            f"stop has {num_characters} characters together; give at most {MAX_ALL_STOP_CHARACTERS}"
        )
    return tuple(stops)


def parse_content(value: object) -> str | None:
    """Return the text of a message: a string, a list of text parts, or null."""
    if value is None:
        return None
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


def parse_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """Return (token id, number) pairs of an object with token ids as keys."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError(f"logit_bias is {show(value)}, but must be an object of token ids")
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise ValueError(f"logit_bias has the key {show(key)}, but keys must be token ids")
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(
                f"logit_bias of token {key} is {show(bias)}, but must be a number in "
                f"{-MAX_BIAS} .. {MAX_BIAS}"
            )
    return tuple((int(key), float(bias)) for key, bias in value.items())


def parse_token_ids(value: object) -> tuple[int, ...]:
    """Return token ids; null for none."""
    if value is None:
        return ()
    if not isinstance(value, list) or not _is_token_ids(value) or len(value) > MAX_STOP_IDS:
        raise ValueError(
            f"stop_token_ids is {show(value)}, but must be a list of at most {MAX_STOP_IDS} token "
            "ids"
        )
    return tuple(value)


def parse_tools(value: object) -> tuple[Tool, ...]:
    """Return the functions that the model may call; null for none."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError(f"tools is {show(value)}, but must be a list of functions")
    return tuple(_parse_tool(each) for each in value)


def _parse_tool(value: object) -> Tool:
    kind = value.get("type") if isinstance(value, dict) else None
    function = value.get("function") if isinstance(value, dict) else None
    if kind != "function" or not isinstance(value, dict) or not isinstance(function, dict):
        raise ValueError(
            f"tools has one of type {show(kind)}; this server knows "
            '{"type": "function", "function": {...}} only: for others use vLLM or SGLang'
        )
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TOOL_NAME:
        raise ValueError(
            f"tools has a function with the name {show(name)}, but it must be a text of 1 to "
            f"{MAX_TOOL_NAME} characters"
        )
    if parameters is not None and not isinstance(parameters, dict):
        raise ValueError(
            f"tools has the function {show(name)} with the parameters {show(parameters)}, but they "
            "must be a JSON schema"
        )
    _check_texts("tools", value)
    return Tool(name, parameters or {"type": "object"}, value)


def _check_texts(name: str, value: object) -> None:
    """Check all texts in a JSON value."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half of a surrogate pair; send whole characters") from error


def parse_tool_choice(value: object) -> ToolChoice:
    """Return which calls are wanted; null for the default."""
    if value is None or value in ("none", "auto", "required"):
        return ToolChoice(str(value or "auto"))
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(value, dict) or value.get("type") != "function" or not isinstance(name, str):
        raise ValueError(
            f'tool_choice is {show(value)}, but must be "none", "auto", "required" or '
            '{"type": "function", "function": {"name": ...}}: for others use vLLM or SGLang'
        )
    return ToolChoice("required", name)


def parse_tool_calls(value: object) -> list[dict[str, object]]:
    """Return the calls of an earlier answer as chat templates take them: arguments as objects."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"tool_calls is {show(value)}, but must be a list of calls")
    calls: list[dict[str, object]] = []
    for each in value:
        function = each.get("function") if isinstance(each, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise ValueError(
                f'tool_calls has {show(each)}; a call is {{"id": ..., "type": "function", '
                '"function": {"name": ..., "arguments": ...}}'
            )
        arguments = _parse_arguments(function.get("arguments"))
        _check_texts("tool_calls", [each, arguments])
        call_id = {"id": each["id"]} if isinstance(each.get("id"), str) else {}
        made = {"name": name, "arguments": arguments}
        calls.append({**call_id, "type": "function", "function": made})
    return calls


def _parse_arguments(value: object) -> dict[str, object] | str:
    """Return the arguments of an earlier call: an object, or the text that is none.

    A model may have written anything, such as an object that ``max_tokens`` has cut.
    """
    found: object = value
    if isinstance(value, str):
        try:
            found = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            return value
    if isinstance(found, dict):
        return found
    if found is None or found == []:  # no arguments, as some clients write it
        return {}
    if isinstance(value, str):
        return value
    raise ValueError(
        f"tool_calls has the arguments {show(value)}, but they must be a JSON object, as text"
    )


def parse_response_format(value: object) -> ResponseFormat | None:
    """Return the JSON that an answer has to be; None for any text."""
    kind = value.get("type") if isinstance(value, dict) else value
    if kind is None and value is None:
        return None
    if isinstance(value, dict) and kind == "text":
        return None
    if isinstance(value, dict) and kind == "json_object":
        return ResponseFormat({"type": "object"})
    if not isinstance(value, dict) or kind != "json_schema":
        raise ValueError(
            f"response_format is of type {show(kind)}; this server knows text, json_object and "
            "json_schema: for others use vLLM or SGLang"
        )
    given = value.get("json_schema")
    schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(schema, dict):
        raise ValueError(
            'response_format has no schema; send {"type": "json_schema", "json_schema": {"name": '
            '..., "schema": {...}}}'
        )
    _check_texts("response_format", schema)
    return ResponseFormat(schema)


def parse_variables(value: object) -> dict[str, object]:
    """Return variables for the chat template; null for none."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"chat_template_kwargs is {show(value)}, but must be an object")
    _check_texts("chat_template_kwargs", value)
    return value


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
_OBJECTS: dict[str, object] = {"type": "array", "items": {"type": "object"}}
Content = Annotated[
    str | None,
    PlainValidator(parse_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, _OBJECTS, {"type": "null"}]}),
]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(parse_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
TokenIds = Annotated[
    tuple[int, ...],
    PlainValidator(parse_token_ids),
    WithJsonSchema({**_TOKEN_IDS, "maxItems": MAX_STOP_IDS}),
]
Tools = Annotated[tuple[Tool, ...], PlainValidator(parse_tools), WithJsonSchema(_OBJECTS)]
Choice = Annotated[
    ToolChoice,
    PlainValidator(parse_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}),
]
Calls = Annotated[
    list[dict[str, object]], PlainValidator(parse_tool_calls), WithJsonSchema(_OBJECTS)
]
Format = Annotated[
    ResponseFormat | None,
    PlainValidator(parse_response_format),
    WithJsonSchema({"type": "object", "required": ["type"]}),
]
Variables = Annotated[
    dict[str, object], PlainValidator(parse_variables), WithJsonSchema({"type": "object"})
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
                "prefetch": {"type": "object", "required": ["within_s"]},
                "demote": {"type": "object"},
            },
        }
    ),
]
