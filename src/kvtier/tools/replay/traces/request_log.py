"""Logs of vLLM or SGLang with the token ids of requests.

vLLM (``--enable-log-requests``): lines with ``prompt_token_ids: [...]``, written at INFO by older
versions, at DEBUG by newer ones. SGLang (``--log-requests --log-requests-level 3``): lines with
``Receive: obj=GenerateReqInput(... input_ids=[...]``, or JSON with ``request.received``.

A prompt may contain anything, also text that looks like a request's line. So a line counts only if
its message begins with the engine's own words, and token ids only if they are outside of quotes.
Each line is read in time linear in its length, also one that is put together from pieces. A line
that can't be read is left out and counted. Ids are hashed as they are read, with a salt that is
never written. The log does not contain the lengths of answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from kvtier.core.errors import ConfigError
from kvtier.tools.replay.trace import Trace, TraceBuilder, chained
from kvtier.tools.replay.traces.clock import Clock
from kvtier.tools.replay.traces.lines import TraceLine
from kvtier.tools.replay.traces.log_lines import LinePieces

if TYPE_CHECKING:
    from kvtier.tools.replay.options import ReadOptions
    from kvtier.tools.replay.trace import Keys

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


_WORDS = re.compile(r"Received request |Request [^\s'\"{]+ details|Receive: obj=|request\.received")
"""Words of a request's message, in a line of JSON that cannot be read."""
_START = re.compile(
    r"(?:\([^()]{0,80}\) )?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|\[?[0-9]{4}-[0-9]{2}-[0-9]{2}[ T])"
)
"""Pattern of the beginning of a line, as vLLM and SGLang write it."""
LIMITS = frozenset({16 << 10, 48 << 10})
"""Bytes after which lines are cut: by Docker in front of journald, and by journald (LineMax)."""
MAX_STRIPPED = 64
"""Most blanks that journald removes where it cuts."""
MAX_UNFINISHED = 16
"""Most lines, of different sources, of which pieces are missing at a time."""


class _CutError(ConfigError):
    """The line ends within a request."""


class _Request(NamedTuple):
    """A request's line: its token ids as logged, and the text that contains its time."""

    ids: Any
    when: str


def recognises(line: TraceLine) -> bool:
    try:
        return _found_head(line) is not None or _event(line) is not None
    except ConfigError:  # it is one, and can't be read
        return True


def read(lines: Iterator[TraceLine], options: ReadOptions, file_number: int) -> Trace:
    builder = TraceBuilder(options.chains.block_tokens, options.coarsen)
    clock = Clock()
    notes = ["The log does not say how long the answers were."]
    unreadable = 0
    first_error: ConfigError | None = None
    for line, found in _joined(lines):
        try:
            if isinstance(found, Exception):
                raise found
            prompts = [] if found is None else _prompts(line, found.ids)
            time_s = clock.time_s(line, found.when) if found and prompts else 0.0
            keys = [_keys(line, prompt, options) for prompt in prompts]
        except ConfigError as error:
            if line.text.endswith("\n"):
                unreadable += 1
                first_error = first_error or error
            else:
                notes.append(line.cut_short())
            continue
        for prompt, its_keys in zip(prompts, keys, strict=True):
            line.check_room(len(prompt) // builder.block_tokens, builder)
            builder.add(time_s, its_keys, len(prompt), 0)
    trace = replace(builder.build(notes), has_year=clock.has_year)
    if first_error is None:
        return trace
    if not trace.num_requests:
        raise first_error
    lines_are = "line of a request is" if unreadable == 1 else "lines of requests are"
    note = f"{unreadable:,} {lines_are} left out, which can't be read. The first one: {first_error}"
    return replace(trace, notes=(*trace.notes, note))


class _Unfinished(LinePieces):
    """A request's line of which pieces are missing."""

    def __init__(self, first: TraceLine) -> None:
        super().__init__(first)
        self._piece_bytes = self._last_bytes = _num_bytes(first)

    def continues_with(self, line: TraceLine) -> bool:
        """Return whether ``line`` is the next piece.

        It may begin with anything, since clients choose the text of prompts, also with what looks
        like the beginning of a line. That counts unless the line before was cut at the limit.
        """
        return self._last_bytes in LIMITS or not (_START.match(line.text) or recognises(line))

    def is_last(self, line: TraceLine) -> bool:
        """Return whether ``line`` is shorter than the pieces before it."""
        return _num_bytes(line) < self._piece_bytes - MAX_STRIPPED

    def follow(self, line: TraceLine) -> None:
        """Add the next piece."""
        self._last_bytes = _num_bytes(line)
        self.add(line.text)


def _joined(
    lines: Iterator[TraceLine],
) -> Iterator[tuple[TraceLine, _Request | ConfigError | None]]:
    """Yield each line with its request, or the reason why there is none.

    The pieces of a request's line that nothing marks as pieces are joined. Other lines may come
    between them, if their source is another one.
    """
    unfinished: dict[str, _Unfinished] = {}

    def finished(source: str, is_whole: bool = True) -> tuple[TraceLine, Any]:
        line = unfinished.pop(source).line(is_whole)
        return line, _found(line)

    for line in lines:
        if line.source is None:
            yield line, _found(line)
            continue
        if (before := unfinished.get(line.source)) is not None:
            if before.continues_with(line):
                before.follow(line)
                if before.is_last(line):
                    yield finished(line.source, line.text.endswith("\n"))
                continue
            yield finished(line.source)
        found = _found(line)
        if not (line.text.endswith("\n") and _is_piece(line, found)):
            yield line, found
            continue
        if len(unfinished) == MAX_UNFINISHED:
            yield finished(next(iter(unfinished)))
        unfinished[line.source] = _Unfinished(line)
    for source in [*unfinished]:
        yield finished(source)


def _found(line: TraceLine) -> _Request | ConfigError | None:
    try:
        return _request(line)
    except ConfigError as error:
        return error


def _is_piece(line: TraceLine, found: _Request | ConfigError | None) -> bool:
    """Return whether a line may be the first piece of a request's line."""
    if isinstance(found, _Request):  # the ids may begin in the next piece
        return found.ids is None and _num_bytes(line) in LIMITS
    return isinstance(found, _CutError)


def _num_bytes(line: TraceLine) -> int:
    return len(line.text.removesuffix("\n").encode(errors="replace"))


def _keys(line: TraceLine, prompt: list[int], options: ReadOptions) -> Keys:
    try:
        return chained(options.chains.keys(prompt))
    except ConfigError as error:
        line.refuse(str(error))


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
    except RecursionError:
        line.refuse("a request whose JSON can't be read")
    except ValueError:
        raise _cut(line) from None
    if not isinstance(event, dict) or event.get("event") != _EVENT:
        return None
    return event, f"{line.stamp} {line.text[:begin]} {_text_of(event, ('timestamp',))}"


def _found_head(line: TraceLine) -> tuple[str, str, int, str] | None:
    """Return the message, the text with its time, the end of the engine's own words, and the head.

    The head is the text before token ids in it. Returns None for any other line.
    """
    message, when = line.text, line.stamp
    if message.lstrip()[:1] == "{" and any(f'"{name}"' in message for name in _MESSAGE_FIELDS):
        try:
            fields = json.loads(message)
        except RecursionError:
            return None
        except ValueError:
            if _WORDS.search(message, 0, HEAD):
                raise _cut(line) from None
            return None
        message = _text_of(fields, _MESSAGE_FIELDS[:1]) or _text_of(fields, _MESSAGE_FIELDS[1:])
        when += " " + _text_of(fields, [name for name in fields if name not in _MESSAGE_FIELDS])
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
            raise _cut(line)  # a quote that never ends
    if depth:
        raise _cut(line)
    return None


def _list(line: TraceLine, message: str, begin: int) -> Any:
    if begin >= len(message.rstrip("\n")):
        raise _cut(line)
    if not message.startswith("[", begin):
        return None
    end = message.find("]]" if message.startswith("[[", begin) else "]", begin)
    end += 2 if message.startswith("[[", begin) else 1
    if end <= begin:
        raise _cut(line)
    if message.startswith(" ... ", end):
        _refuse_ids(line)
    try:
        return json.loads(message[begin:end])
    except (ValueError, RecursionError):
        _refuse_ids(line)


def _cut(line: TraceLine) -> _CutError:
    why = "the line ends within a request: a limit cut it, or another line was written into it"
    return _CutError(str(line.refusal(why)))


def _refuse_ids(line: TraceLine) -> NoReturn:
    line.refuse(
        "the token ids are cut short or no integers: have the server log them in full "
        "(vLLM without --max-log-len, SGLang with --log-requests-level 3)"
    )
