"""Tool calls in the text of a model: how its chat template writes them, and how they are read.

A call is reported when it is complete. Text that began like one, and is none, stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtier.serve.engine import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_PROBE: dict[str, object] = {"name": "probe_call", "arguments": {"probe": 1}}
_PROBE_TOOL: dict[str, object] = {
    "name": "probe_tool",
    "description": "",
    "parameters": {"type": "object", "properties": {}},
}


class CallForm(Enum):
    """Form in which a model writes calls."""

    TAGGED = "arguments"
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Qwen and Hermes."""
    BARE = "parameters"
    """``{"name": ..., "parameters": {...}}`` alone, as Llama 3."""


_WRITTEN = {
    CallForm.TAGGED: re.compile(
        r'<tool_call>\s*\{"name": ?"probe_call", ?"arguments": ?\{"probe": ?1\}\}\s*</tool_call>'
    ),
    CallForm.BARE: re.compile(r'\{"name": ?"probe_call", ?"parameters": ?\{"probe": ?1\}\}'),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. arguments: a JSON object, as text."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


def find_form(tokenizer: Tokenizer) -> CallForm | None:
    """Return the form in which the model's chat template writes calls; None for any other.

    The template is not read but tried: it renders a tool and a call.
    """
    turns: list[dict[str, object]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [_typed(_PROBE)]},
    ]
    try:
        text = tokenizer.render_chat(turns, [_typed(_PROBE_TOOL)], for_answer=False)
    except Exception:  # a template may raise anything
        return None
    if "probe_tool" not in text:
        return None
    return next((form for form, written in _WRITTEN.items() if written.search(text)), None)


class CallReader:
    """Reads the calls in one choice's text, piece by piece.

    The pieces of text that it returns are the whole text without calls, without the white space
    after them, and at the beginning or end of the text also before them.

    max_calls: further calls are dropped; 0 for none.
    """

    def __init__(self, form: CallForm, max_calls: int = 0) -> None:
        self._form = form
        self._max_calls = max_calls
        self._pending = ""
        self._is_inside = False  # a call that has begun
        self._is_text = False  # the answer is no bare call
        self._is_after_call = self._has_text = False
        self._space = ""  # at the end of the text so far
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text. Return the text that is certain now, and the calls that are complete."""
        if self._form is CallForm.BARE:
            return self._push_bare(text), []
        self._pending += text
        given, calls = "", list[ToolCall]()
        while True:
            if not self._is_inside:
                before, tag, after = self._pending.partition(OPEN)
                if not tag:
                    held = _held(before)
                    given += self._text(before[:held])
                    self._pending = before[held:]
                    return given, calls
                given += self._text(before)
                self._pending, self._is_inside = after, True
            inside, tag, after = self._pending.partition(CLOSE)
            if not tag:
                return given, calls
            self._pending, self._is_inside = after, False
            found = _read(inside, self._form)
            calls += self._counted(found)
            given += "" if found else self._text(OPEN + inside + CLOSE)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return what was held back, at the end of the answer."""
        begun = OPEN * self._is_inside
        held = begun or self._form is CallForm.BARE
        found = _read(self._pending, self._form) if held else []
        calls = self._counted(found)
        given = "" if found else self._text(begun + self._pending)
        self._pending = ""
        return given + ("" if self.num_calls else self._space), calls

    def _push_bare(self, text: str) -> str:
        """Hold everything back if the answer begins like an object."""
        if self._is_text:
            return text
        self._pending += text
        begin = self._pending.lstrip()[:1]
        if begin in ("", "{"):
            return ""
        self._is_text = True
        text, self._pending = self._pending, ""
        return text

    def _text(self, text: str) -> str:
        """Return text with the white space before it; keep what is at its end."""
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        if not text:
            return ""
        text = self._space + text
        given = text.rstrip()
        self._space = text[len(given) :]
        self._has_text = self._has_text or bool(given)
        return given

    def _counted(self, calls: list[ToolCall]) -> list[ToolCall]:
        if self._max_calls:
            calls = calls[: max(0, self._max_calls - self.num_calls)]
        self.num_calls += len(calls)
        if calls:
            self._is_after_call = True
            self._space = self._space if self._has_text else ""
        return calls


def grammar_of_calls(form: CallForm, tools: Sequence[tuple[str, str]], is_single: bool) -> str:
    """Return rules of a Lark grammar for ``calls``: at least one call of these tools.

    tools: name and JSON schema of the arguments of each.
    """
    rules = [f"one_call: {' | '.join(f'call_{at}' for at in range(len(tools)))}"]
    for at, (name, schema) in enumerate(tools):
        begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.value}": '
        rules.append(f'call_{at}: {_literal(begin)} arguments_{at} "}}"')
        rules.append(f"arguments_{at}: %json {schema}")
    if form is CallForm.BARE:
        return "\n".join(["calls: one_call", *rules])
    tagged = f'tagged: "{OPEN}\\n" one_call "\\n{CLOSE}"'
    calls = "calls: tagged" if is_single else 'calls: tagged ("\\n" tagged)*'
    return "\n".join([calls, tagged, *rules])


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _typed(function: dict[str, object]) -> dict[str, object]:
    return {"type": "function", "function": function}


def _held(text: str) -> int:
    """Return where a tail of ``text`` begins that may become a call; its end if none does."""
    longest = min(len(OPEN) - 1, len(text))
    return len(text) - next(
        (size for size in range(longest, 0, -1) if text.endswith(OPEN[:size])), 0
    )


def _read(text: str, form: CallForm) -> list[ToolCall]:
    """Return the one call in ``text``, or several bare ones; none if it is anything else."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    calls: list[ToolCall] = []
    rest = text.strip()
    try:
        while rest:
            value, end = decoder.raw_decode(rest)
            arguments = value.get(form.value)
            if not isinstance(value.get("name"), str) or not isinstance(arguments, dict):
                return []
            shown = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            calls.append(ToolCall(value["name"], shown))
            rest = rest[end:].lstrip(" \t\r\n;" if form is CallForm.BARE else " \t\r\n")
            if rest and form is CallForm.TAGGED:
                return []
    except (ValueError, AttributeError, RecursionError):
        return []
    return calls


def _refuse(name: str) -> object:
    raise ValueError(name)
