"""Logs of vLLM or SGLang with the token ids of requests.

vLLM (``--enable-log-requests``): lines with ``prompt_token_ids: [...]``, written at INFO by older
versions, at DEBUG by newer ones. SGLang (``--log-requests --log-requests-level 3``): lines with
``Receive: obj=GenerateReqInput(... input_ids=[...]``, or JSON with ``request.received``.

A prompt may contain anything, also text that looks like a request's line. So a line counts only if
its message begins with the engine's own words, and token ids only if they are outside of quotes.
Each line is read in time linear in its length. Ids are hashed as they are read, with a salt that is
never written. The log does not contain the lengths of answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from kvtier.errors import ConfigError
from kvtier.tools.replay.trace import Trace, TraceBuilder, chained
from kvtier.tools.replay.traces.clock import Clock
from kvtier.tools.replay.traces.lines import TraceLine

if TYPE_CHECKING:
    from kvtier.tools.replay.traces.options import ReadOptions

NAME = "request logs of vLLM, SGLang"

HEAD = 1000
"""First characters of a line, within which the engine's words must begin."""
_BEFORE = r"""[^'"{]*?"""
"""Pattern of process, level, time and file. Text chosen by a client is in quotes or in JSON."""
_HEADS = {
    ", prompt_token_ids: ": re.compile(
        _BEFORE + r"\b(?:Received request|Request) [^\s'\"{]+(?: details)?: prompt: "
    ),
    "input_ids=": re.compile(_BEFORE + r"\bReceive: obj=\w+\("),
}
"""Pattern of a request's message, by the text before its token ids."""
_EVENT = "request.received"
_EVENT_HEAD = re.compile(
    _BEFORE + r'(?P<json>\{\s*(?:"\w+":\s*"[^"\\]*",\s*){0,9}"event":\s*"request\.received")'
)
_MESSAGE_FIELDS = ("message", "msg", "log")
"""Names that loggers in JSON give to the text of a line."""
_PARTS = re.compile(
    r"""'[^'\\]*+(?:\\.[^'\\]*+)*+(?P<end>'|\\?\Z)"""
    r"""|"[^"\\]*+(?:\\.[^"\\]*+)*+(?P<end2>"|\\?\Z)"""
    r"""|[(\[{]|[)\]}]|, prompt_token_ids: |\binput_ids=""",
    re.DOTALL,
)
"""Pattern of quoted text in the form of ``repr``, of brackets, and of the text before token ids."""


class _Request(NamedTuple):
    """A request's line: its token ids as logged, and the text that contains its time."""

    ids: Any
    when: str


def recognises(line: TraceLine) -> bool:
    return _found_head(line) is not None or _event(line) is not None


def read(lines: Iterator[TraceLine], options: ReadOptions, file_number: int) -> Trace:
    builder = TraceBuilder(options.chains.block_tokens, options.coarsen)
    clock = Clock()
    notes = ["The log does not say how long the answers were."]
    for line in lines:
        try:
            request = _request(line)
            prompts = [] if request is None else _prompts(line, request.ids)
        except ConfigError:
            if line.text.endswith("\n"):
                raise
            notes.append(line.cut_short())
            break
        if request is None or not prompts:
            continue
        time_s = clock.time_s(line, request.when)
        for prompt in prompts:
            line.check_room(len(prompt) // builder.block_tokens, builder)
            try:
                keys = chained(options.chains.keys(prompt))
            except ConfigError as error:
                line.refuse(str(error))
            builder.add(time_s, keys, len(prompt), 0)
    return replace(builder.build(notes), has_year=clock.has_year)


def _request(line: TraceLine) -> _Request | None:
    """Return the request of a line; None for any other line."""
    if event := _event(line):
        fields, when = event
        asked = fields.get("obj")
        return _Request(asked.get("input_ids") if isinstance(asked, dict) else None, when)
    if head := _found_head(line):
        message, when, begin, before_ids = head
        return _Request(_ids(line, message, begin, before_ids), when)
    return None


def _prompts(line: TraceLine, ids: Any) -> list[list[int]]:
    """Return the token ids of each prompt of a request."""
    if not ids:
        return []
    prompts = ids if isinstance(ids, list) and isinstance(ids[0], list) else [ids]
    for prompt in prompts:
        if not isinstance(prompt, list) or not all(type(each) is int for each in prompt):
            _refuse_ids(line)
    return prompts


def _event(line: TraceLine) -> tuple[dict[str, Any], str] | None:
    """Return SGLang's JSON about a request that it received, and the text with its time."""
    if not (head := _EVENT_HEAD.match(line.text, 0, HEAD)):
        return None
    begin = head.start("json")
    try:
        event, _ = json.JSONDecoder().raw_decode(line.text, begin)
    except (ValueError, RecursionError):
        line.refuse("a request whose JSON can't be read")
    if not isinstance(event, dict) or event.get("event") != _EVENT:
        return None
    return event, f"{line.text[:begin]} {_text_of(event, ('timestamp',))}"


def _found_head(line: TraceLine) -> tuple[str, str, int, str] | None:
    """Return the message, the text with its time, the end of the engine's own words, and the head.

    The head is the text before token ids in it. Returns None for any other line.
    """
    message, when = line.text, ""
    if message.lstrip()[:1] == "{" and any(f'"{name}"' in message for name in _MESSAGE_FIELDS):
        try:
            fields = json.loads(message)
        except (ValueError, RecursionError):
            return None
        message = _text_of(fields, _MESSAGE_FIELDS[:1]) or _text_of(fields, _MESSAGE_FIELDS[1:])
        when = _text_of(fields, [name for name in fields if name not in _MESSAGE_FIELDS])
    for before_ids, head in _HEADS.items():
        if found := head.match(message, 0, HEAD):
            return message, f"{when} {found[0]}", found.end(), before_ids
    return None


def _text_of(fields: dict[str, Any], names: Iterable[str]) -> str:
    return " ".join(value for name in names if isinstance(value := fields.get(name), str))


def _ids(line: TraceLine, message: str, begin: int, before_ids: str) -> Any:
    """Return the ids in a message of vLLM or SGLang; None if it has none."""
    depth = 0
    for part in _PARTS.finditer(message, begin):
        text = part[0]
        if text in "([{":
            depth += 1
        elif text in ")]}":
            depth -= 1
        elif text == before_ids and not depth:
            return _list(line, message, part.end())
        elif text[0] in "'\"" and not (part["end"] or part["end2"] or "").strip("\\"):
            _refuse_ids(line)  # a quote that never ends
    return None


def _list(line: TraceLine, message: str, begin: int) -> Any:
    if not message.startswith("[", begin):
        return None
    end = message.find("]]" if message.startswith("[[", begin) else "]", begin)
    end += 2 if message.startswith("[[", begin) else 1
    if end <= begin or message.startswith(" ... ", end):
        _refuse_ids(line)
    try:
        return json.loads(message[begin:end])
    except (ValueError, RecursionError):
        _refuse_ids(line)


def _refuse_ids(line: TraceLine) -> NoReturn:
    line.refuse(
        "the token ids are cut short or no integers: have the server log them in full "
        "(vLLM without --max-log-len, SGLang with --log-requests-level 3)"
    )
