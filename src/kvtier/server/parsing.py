"""From a body's bytes to a checked request. Runs beside the event loop."""

from __future__ import annotations

import json
from typing import NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from kvtier.server.errors import bad_request, from_validation, show

R = TypeVar("R", bound=BaseModel)


def parse(content: bytes, content_type: str, schema: type[R]) -> R:
    """The request that ``content`` holds; ``ApiError`` says what is wrong with it.

    content: has passed a ``Scan``, which bounds the time and the memory that this takes.
    """
    if not content:
        raise bad_request("The body is empty; send a JSON object.", code="invalid_json")
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    if kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
        _refuse_kind()
    value = _load(content)
    if not isinstance(value, dict):
        _refuse_kind()
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None


def _load(content: bytes) -> object:
    try:
        # UTF-8 and nothing else: in UTF-16 the scan would have seen other quotes than the parser.
        value: object = json.loads(content.decode(), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise bad_request(
            f"The body is not valid JSON at character {error.pos}: {error.msg}.",
            code="invalid_json",
        ) from None
    except UnicodeDecodeError as error:
        raise bad_request(
            f"The body can't be read as JSON: byte {error.start} is not UTF-8.",
            code="invalid_json",
        ) from None
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object, whose keys must differ: of two equal ones, programs choose differently."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise bad_request(f"The key {show(twice)} is given twice in one object; give it once.")
    return made


def _refuse_kind() -> NoReturn:
    raise bad_request(
        'The body must be a JSON object, sent with the header "Content-Type: application/json".',
        code="invalid_json",
    )
