"""Traces with the text of prompts: ShareGPT, OpenAI batches, exports of LiteLLM and Langfuse.

A file has one JSON object per line, or is one JSON list of objects. An object is a conversation
(``conversations``), or a request: ``messages``, a batch's ``body``, or Langfuse's ``input``. Text
becomes token ids by ``--tokenizer``, message by message and without a chat template, so prompts
that begin with equal messages begin with equal tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvtier.core.errors import ConfigError, install_command
from kvtier.core.system.user_paths import user_path
from kvtier.tools.replay.trace import BLOCKS_PER_REQUEST, Trace, TraceBuilder, chained
from kvtier.tools.replay.traces.lines import MAX_LINE, MAX_TIME, TraceLine

if TYPE_CHECKING:
    from kvtier.tools.replay.options import ReadOptions
    from kvtier.tools.replay.trace import Keys

NAME = "ShareGPT, OpenAI batches, LiteLLM, Langfuse"

TIMES = ("startTime", "start_time", "timestamp", "created_at", "created")
CONVERSATIONS = ("conversations", "conversation")
PROMPTS = ("messages", "body", "input", "prompt")
"""Fields with a request's prompt. An object of ``WRAPPED`` has one of these itself."""
WRAPPED = ("body", "input")
OUTPUT_TOKENS = ("completion_tokens", "output_tokens", "completionTokens", "output")
USAGES = ("usage", "usageDetails", "usage_details")
ANSWERING = ("gpt", "assistant", "model", "bot", "chatgpt", "bing", "bard")
"""Names of the side that answers, in conversations."""
GENERATION = "GENERATION"
"""Langfuse's type of records that are requests to a model."""

SINCE_1970_MS = 1e11
"""Least time that is taken as milliseconds since 1970."""
TURN_S = 60.0
"""Seconds between two turns of a conversation without times."""
MAX_CACHED = 4096
"""Messages whose token ids are kept: those of a conversation come again with each turn."""
NO_TEMPLATE = (
    "Prompts were tokenized without the chat template, so each has some tokens less than the "
    "server's."
)

_Messages = list[tuple[str, str]]
"""Role and text of each message."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A request whose time may be unknown. after_s: seconds since its conversation began."""

    time_s: float | None
    keys: Keys
    input_tokens: int
    output_tokens: int
    row: int
    after_s: float


def recognises(line: TraceLine) -> bool:
    begin = line.text.lstrip()
    if begin.startswith("["):
        return begin[1:].lstrip()[:1] in ("", "{")
    if not begin.startswith("{"):
        return False
    try:
        fields = json.loads(line.text)
    except (ValueError, RecursionError):
        return False
    return _messages(fields) is not None


def read(lines: Iterator[TraceLine], options: ReadOptions, file_number: int) -> Trace:
    del file_number  # keys are made from contents, so files share what is equal
    first = next(lines)
    if not options.tokenizer:
        first.refuse(
            "its prompts are text, and KV belongs to tokens: give the tokenizer of the model that "
            "serves them, --tokenizer OWNER/NAME or a directory with a tokenizer.json"
        )
    reader = _Reader(options)
    for number, (line, fields) in enumerate(_rows(chain([first], lines))):
        reader.add(number, line, fields)
    return reader.trace(first)


class _Reader:
    """Collects the requests of a file, and spreads requests without a time over ``--hours``."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._encode = _encoder(options.tokenizer)
        self._builder = TraceBuilder(options.chains.block_tokens, options.coarsen)
        self._requests: list[_Request] = []
        self._num_rows = self._num_blocks = self._num_left_out = 0
        self._has_outputs = True

    def add(self, number: int, line: TraceLine, fields: Any) -> None:
        """Add the requests of an object."""
        messages = _messages(fields)
        self._num_rows = number + 1
        if messages is None or fields.get("type", GENERATION) != GENERATION or not messages:
            self._num_left_out += 1
            return
        time_s = _time_s(line, fields)
        tenant = str(fields.get("model") or _object(fields.get("body")).get("model") or "")
        if not any(fields.get(name) for name in CONVERSATIONS):
            output_tokens = _output_tokens(fields)
            self._has_outputs &= output_tokens is not None
            tokens = [token for message in messages for token in self._encode(*message)]
            self._put(line, tenant, tokens, output_tokens or 0, number, time_s, 0.0)
            return
        tokens, turn = [], 0
        for role, text in messages:
            own = self._encode(role, text)
            if role in ANSWERING:
                at_s = None if time_s is None else time_s + turn * TURN_S
                self._put(line, tenant, tokens, len(own), number, at_s, turn * TURN_S)
                turn += 1
            tokens = [*tokens, *own]

    def _put(
        self,
        line: TraceLine,
        tenant: str,
        tokens: list[int],
        output_tokens: int,
        row: int,
        time_s: float | None,
        after_s: float,
    ) -> None:
        keys = chained(self._options.chains.keys(tokens, tenant))
        self._num_blocks += len(keys) + BLOCKS_PER_REQUEST
        line.check_room(self._num_blocks, self._builder)
        request = _Request(time_s, keys, len(tokens), output_tokens, row, after_s)
        self._requests.append(request)

    def trace(self, first: TraceLine) -> Trace:
        requests, options = self._requests, self._options
        if not requests:
            first.refuse("no request: no object of the file has messages")
        num_timed = sum(request.time_s is not None for request in requests)
        notes = [NO_TEMPLATE]
        if num_timed < len(requests):
            notes.append(
                f"The file does not say when requests came: they were spread evenly over "
                f"{options.hours:g} h (--hours), turns of a conversation {TURN_S:.0f} s apart. "
                "What a size saves an hour, and how long blocks wait for their reuse, is assumed."
            )
        if num_timed not in (0, len(requests)):
            first.refuse(
                f"{num_timed} of {len(requests)} requests have a time ({', '.join(TIMES)}); "
                "replay those with and those without apart"
            )
        if not self._has_outputs:
            notes.append("The trace does not say how long all answers were.")
        if self._num_left_out:
            notes.append(
                f"{self._num_left_out} of {self._num_rows} objects are no requests with text, and "
                "were left out."
            )
        step_s = options.hours * 3600 / self._num_rows
        for request in requests:
            time_s = request.time_s
            if time_s is None:
                time_s = request.row * step_s + request.after_s
            self._builder.add(time_s, request.keys, request.input_tokens, request.output_tokens)
        return self._builder.build(notes)


def _rows(lines: Iterator[TraceLine]) -> Iterator[tuple[TraceLine, dict[str, Any]]]:
    """Yield the objects of a file, each with the line that it ends on."""
    first = next(lines)
    if not first.text.lstrip().startswith("["):
        for line in chain([first], lines):
            fields = line.json()
            if not isinstance(fields, dict):
                line.refuse("no JSON object; every line of this trace is one")
            yield line, fields
        return
    decoder = json.JSONDecoder()
    text, line, is_closed = first.text.lstrip()[1:], first, False
    for line in chain([first], lines):
        text += line.text if line is not first else ""
        # An object can only be complete where a line ends with a bracket.
        if line.text.rstrip().rstrip(",")[-1:] not in ("}", "]"):
            if len(text) > MAX_LINE:
                line.refuse(f"an element of more than {MAX_LINE:,} characters")
            continue
        at = 0
        while True:
            while text[at : at + 1].isspace() or text[at : at + 1] == ",":
                at += 1
            if text[at : at + 1] in ("", "]"):
                is_closed = text[at : at + 1] == "]"
                break
            try:
                fields, at = decoder.raw_decode(text, at)
            except RecursionError:
                line.refuse("an element that is nested too deeply")
            except ValueError:
                break  # it goes on in the next line
            if not isinstance(fields, dict):
                line.refuse("every element of this list should be an object")
            yield line, fields
        text = text[at:]
    if not is_closed:
        line.refuse("the file ends within its list, or is no JSON")


def _messages(fields: object) -> _Messages | None:
    """Return the messages of an object; None if it is none with text."""
    if not isinstance(fields, dict):
        return None
    for name in (*CONVERSATIONS, *PROMPTS):
        value = fields.get(name)
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            with suppress(ValueError, RecursionError):
                value = json.loads(value)  # LiteLLM's table has JSON in text
        if name in WRAPPED and isinstance(value, dict):
            inner = _messages(value)
            tools = value.get("tools")
            if inner is not None:
                return [*_tools(tools), *inner]
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            return [*_tools(fields.get("tools")), *map(_message, value)]
        elif isinstance(value, str) and name in ("input", "prompt") and _is_request(fields):
            return [("user", value)]
    return None


def _is_request(fields: dict[str, Any]) -> bool:
    """Whether an object with a mere text as its prompt is a request, and no other program's log."""
    return "model" in fields or any(name in fields for name in TIMES)


def _tools(tools: object) -> _Messages:
    return [("tools", json.dumps(tools, sort_keys=True))] if tools else []


def _message(fields: dict[str, Any]) -> tuple[str, str]:
    """Return the role and the text of a message; images and the like have none."""
    role = str(fields.get("from") or fields.get("role") or "")
    content = fields.get("value", fields.get("content"))
    parts = content if isinstance(content, list) else [content]
    texts = [
        str(part.get("text", "")) if isinstance(part, dict) else str(part or "") for part in parts
    ]
    if fields.get("tool_calls"):
        texts.append(json.dumps(fields["tool_calls"], sort_keys=True))
    return role, "".join(texts)


def _time_s(line: TraceLine, fields: dict[str, Any]) -> float | None:
    """Return the time of an object, in seconds since 1970; None if it has none."""
    name = next((name for name in TIMES if fields.get(name) is not None), None)
    if name is None:
        return None
    value = fields[name]
    if isinstance(value, str):
        return line.time_of(value, name)
    time = line.number_of(fields, name)
    return time / 1000 if time >= SINCE_1970_MS else time


def _output_tokens(fields: dict[str, Any]) -> int | None:
    """Return the tokens of the answer; None if the object does not say."""
    response = _object(fields.get("response"))
    places = [
        fields,
        *(_object(fields.get(name)) for name in USAGES),
        *(_object(_object(response.get("body", response)).get(name)) for name in USAGES),
    ]
    for place in places:
        for name in OUTPUT_TOKENS:
            value = place.get(name)
            if isinstance(value, int | float) and 0 <= value < MAX_TIME:
                return int(value)
    return None


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _encoder(name: str) -> Any:
    """Return a function from the role and the text of a message to token ids."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            f"tokenizer: the package tokenizers is missing; install it: {install_command('replay')}"
        ) from None
    place = user_path(name)
    path = place / "tokenizer.json" if place.is_dir() else place
    try:
        tokenizer = (
            Tokenizer.from_file(str(path)) if path.is_file() else Tokenizer.from_pretrained(name)
        )
    except Exception as error:  # any type: tokenizers has none of its own
        reason = str(error).partition("\n")[0][:200]
        raise ConfigError(
            f"tokenizer: {name!r} is no tokenizer.json, no directory with one, and can't be had "
            f"from the Hugging Face hub ({reason})"
        ) from error

    @lru_cache(MAX_CACHED)
    def encode(role: str, text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(f"{role}\n{text}\n", add_special_tokens=False).ids
        return ids

    return encode
