"""Tool calls in texts: forms of templates, and parsing whole texts or pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.serve.engine import Tokenizer
from kvtier.serve.engine.model_names import BUILTIN
from kvtier.serve.server.tool_calls import CallForm, CallReader, find_form

pytestmark = pytest.mark.engine

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
OTHER = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": "é"}}'


def read(form: CallForm, pieces: list[str], max_calls: int = 0) -> tuple[str, list[Any]]:
    reader = CallReader(form, max_calls)
    found = [reader.push(piece) for piece in pieces] + [reader.finish()]
    text = "".join(given for given, _ in found)
    calls = [call for _, calls in found for call in calls]
    assert reader.num_calls == len(calls)
    assert all(call.call_id.startswith("call_") for call in calls)
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


F: Any = ("f", {"a": "é"})
G: Any = ("g", {})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("hello  ", "hello  ", []),
        (CALL, "", [F]),
        (f"I look.\n\n{CALL}\n", "I look.", [F]),
        (f"{CALL}\n{OTHER}", "", [F, G]),
        (f"{CALL} and {OTHER} so", "and so", [F, G]),
        (CALL.removesuffix("</tool_call>"), "", [F]),  # the model ended without the tag
        (CALL[:30], CALL[:30], []),
        ("<tool_call>{]</tool_call>", "<tool_call>{]</tool_call>", []),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
        (f"<tool_call>{LLAMA}</tool_call>", f"<tool_call>{LLAMA}</tool_call>", []),
        (
            '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
            [],
        ),
        ("a <tool_cal", "a <tool_cal", []),
        ("a < b", "a < b", []),
        (LLAMA, LLAMA, []),
        ("<tool_call>" + "[" * 99_999, "<tool_call>" + "[" * 99_999, []),
    ],
)
def test_tagged_calls_are_read(text: str, content: str, calls: list[Any]) -> None:
    assert read(CallForm.TAGGED, [text]) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("hello  ", "hello  ", []),
        (LLAMA, "", [F]),
        (f"\n{LLAMA} ", "", [F]),
        (f'{LLAMA}; {{"name": "g", "parameters": {{}}}}', "", [F, G]),
        (f"see {LLAMA}", f"see {LLAMA}", []),
        (f"{LLAMA} so", f"{LLAMA} so", []),
        ('{"a": 1}', '{"a": 1}', []),
        (LLAMA[:-1], LLAMA[:-1], []),
        ("  ", "  ", []),
    ],
)
def test_bare_calls_are_the_whole_answer(text: str, content: str, calls: list[Any]) -> None:
    assert read(CallForm.BARE, [text]) == (content, calls)


PARTS = st.lists(
    st.sampled_from(["a", " ", "\n", "<", "<tool", "<tool_call>", "</tool_call>", CALL, OTHER, "{"])
)


@given(
    parts=PARTS,
    cuts=st.lists(st.integers(0, 200)),
    form=st.sampled_from(CallForm),
    max_calls=st.integers(0, 2),
)
@example(parts=["<tool", "<tool_call>", CALL], cuts=[3, 7], form=CallForm.TAGGED, max_calls=0)
def test_any_cutting_reads_the_same(
    parts: list[str], cuts: list[int], form: CallForm, max_calls: int
) -> None:
    text = "".join(parts)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    content, calls = read(form, pieces, max_calls)
    assert (content, calls) == read(form, [text], max_calls)
    if not calls:
        assert content == text
    if max_calls:
        assert calls == read(form, [text])[1][:max_calls]


def test_text_is_handed_on_as_soon_as_it_is_none_of_a_call() -> None:
    reader = CallReader(CallForm.TAGGED)
    assert [reader.push(piece)[0] for piece in ("ab <too", "ls> c", "<")] == [
        "ab",
        " <tools> c",
        "",
    ]
    bare = CallReader(CallForm.BARE)
    assert [bare.push(piece)[0] for piece in (" ", "a", "{")] == ["", " a", "{"]


class Templated:
    """A tokenizer with another chat template."""

    def __init__(self, template: str) -> None:
        made = Tokenizer(BUILTIN / "kvtier-tiny")
        cast(Any, made.own).chat_template = template
        self.tokenizer = made


TURNS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
END = "{% endfor %}"
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
QWEN = (
    "{% for c in m['tool_calls'] or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
LLAMA_3 = (
    "{% for c in m['tool_calls'] or [] %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% endfor %}"
)
CODER = (
    "{% for c in m['tool_calls'] or [] %}<tool_call>\n<function={{ c.function.name }}>"
    "</function>\n</tool_call>{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (TOOLS + TURNS + QWEN + END, CallForm.TAGGED),
        (TOOLS + TURNS + LLAMA_3 + END, CallForm.BARE),
        (TOOLS + TURNS + CODER + END, None),
        (TURNS + QWEN + END, None),  # this template shows the model no tools
        (TOOLS + TURNS + END, None),
        ("{{ raise_exception('no') }}", None),
        ("{% broken", None),
    ],
)
def test_the_form_is_found_by_trying_the_template(template: str, form: CallForm | None) -> None:
    assert find_form(Templated(template).tokenizer) is form


def test_the_built_in_template_writes_tagged_calls() -> None:
    assert find_form(Tokenizer(Path(BUILTIN) / "kvtier-tiny")) is CallForm.TAGGED
