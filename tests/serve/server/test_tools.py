"""Tools in conversations: rendered, forced, answered and streamed."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import openai
import pytest

from kvtier.core.errors import install_command
from kvtier.serve.engine import Engine, Grammar
from kvtier.serve.engine.grammar import Grammars
from kvtier.serve.server import service
from kvtier.serve.server.fields import ToolChoice, parse_tools
from kvtier.serve.server.grammars import grammar_of_answer
from kvtier.serve.server.tool_calls import CallForm, CallReader
from tests.kit.waiting import wait_until

from .conftest import MODEL, Running
from .raw import error_of

pytestmark = pytest.mark.engine

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of some days.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"$ref": "#/$defs/days"},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
ODD: Any = {
    "type": "function",
    "function": {
        "name": 'odd "näme"\n',
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}
ASKED: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "How is the weather?"}],
    "tools": [WEATHER, ODD],
    "temperature": 0,
    "max_tokens": 80,
}


def prompt_tokens(client: openai.OpenAI, **changes: Any) -> int:
    answer = client.chat.completions.create(**{**ASKED, "max_tokens": 1, **changes})
    assert answer.usage is not None
    return answer.usage.prompt_tokens


def rendered(engine: Engine, messages: Any, tools: Any = None) -> int:
    """Return the number of tokens to which transformers itself renders a conversation."""
    text = engine.tokenizer.own.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False
    )
    return len(engine.tokenizer.encode(str(text)))


def test_tools_and_their_results_are_rendered_as_by_transformers(
    client: openai.OpenAI, engine: Engine
) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Rome", "days": 3}'}
    turns: Any = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "And in Rome?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I have to look.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "mild"}]},
    ]
    parsed = {**function, "arguments": {"city": "Rome", "days": 3}}
    plain: Any = [
        *turns[:2],
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": parsed}],
        },
        {"role": "tool", "content": "mild"},
    ]
    expected = rendered(engine, plain, [WEATHER])
    assert prompt_tokens(client, messages=turns, tools=[WEATHER]) == expected
    assert expected > rendered(engine, plain)
    assert prompt_tokens(client, messages=turns, tools=None) == rendered(engine, plain)


def test_variables_reach_the_template(
    client: openai.OpenAI, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% if mood is defined %}{{ mood }}{% else %}{{ messages[0].content }}{% endif %}"
    monkeypatch.setattr(engine.tokenizer.own, "chat_template", template)
    for mood in ("glad", "very, very glad"):
        given: Any = {"chat_template_kwargs": {"mood": mood}}
        expected = len(engine.tokenizer.encode(mood))
        assert prompt_tokens(client, tools=None, extra_body=given) == expected
    assert prompt_tokens(client, tools=None) == len(engine.tokenizer.encode("How is the weather?"))


@pytest.mark.parametrize("tool_choice", ["auto", "none", None])
def test_an_answer_without_a_call_is_text(client: openai.OpenAI, tool_choice: Any) -> None:
    answer = client.chat.completions.create(**ASKED, tool_choice=tool_choice)
    message = answer.choices[0].message
    assert message.tool_calls is None
    assert message.content
    assert answer.choices[0].finish_reason == "stop"
    streamed = client.chat.completions.create(**ASKED, tool_choice=tool_choice, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == message.content


def test_no_call_and_any_call_have_the_same_prompt(client: openai.OpenAI) -> None:
    found = [prompt_tokens(client, tool_choice=each) for each in ("none", "auto", "required")]
    assert len(set(found)) == 1


def check_weather(name: str, arguments: str) -> None:
    assert name == "get_weather"
    given = json.loads(arguments)
    assert set(given) == {"city", "days"}
    assert given["city"] in ("Paris", "Rome")
    assert 1 <= given["days"] <= 9
    assert json.dumps(given) == arguments


NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(("n", "temperature"), [(1, 0), (3, 1.5)])
def test_a_required_call_fits_its_schema(client: openai.OpenAI, n: int, temperature: float) -> None:
    asked = {**ASKED, "temperature": temperature, "seed": 3, "n": n}
    answer = client.chat.completions.create(**asked, tool_choice=NAMED, parallel_tool_calls=False)
    ids = set()
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        check_weather(call.function.name, call.function.arguments)
        ids.add(call.id)
    assert len(ids) == n


@pytest.mark.parametrize("parallel", [{}, {"parallel_tool_calls": False}])
def test_any_name_can_be_forced_and_is_called_once(client: openai.OpenAI, parallel: Any) -> None:
    odd: Any = {"type": "function", "function": {"name": ODD["function"]["name"]}}
    answer = client.chat.completions.create(**ASKED, tool_choice=odd, **parallel)
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == ODD["function"]["name"]
    assert set(json.loads(call.function.arguments)) == {"on"}


REPLAYED: list[Any] = [
    {"reasoning": "a thought"},
    {"reasoning_details": [{"type": "reasoning.text", "text": "a thought"}]},
    {"annotations": [{"type": "url_citation"}], "refusal": "", "audio": None},
    {"provider_specific_fields": {"thought_signature": "x"}, "function_call": None},
    {"id": 1947, "opts": {"visible": False}, "index": 0},
]


@pytest.mark.parametrize("more", REPLAYED)
def test_fields_of_messages_that_ask_for_nothing_change_nothing(
    client: openai.OpenAI, more: Any
) -> None:
    def tokens(**more: Any) -> int:
        said = {"role": "assistant", "content": "mild", **more}
        return prompt_tokens(client, messages=[*ASKED["messages"], said, *ASKED["messages"]])

    assert tokens(**more) == tokens()


@pytest.mark.parametrize(
    ("arguments", "like"),
    [("[]", "{}"), ([], "{}"), ("null", "{}"), (None, "{}"), (" ", "{}"), ('{"city": "Ro', None)],
)
def test_any_arguments_of_an_earlier_call_are_taken(
    client: openai.OpenAI, arguments: Any, like: str | None
) -> None:
    def tokens(arguments: Any) -> int:
        function = {"name": "get_weather", "arguments": arguments}
        call = {"id": "call_1", "type": "function", "function": function}
        turns = [
            *ASKED["messages"],
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "mild"},
        ]
        return prompt_tokens(client, messages=turns)

    found = tokens(arguments)
    assert found == tokens(like) if like else found > tokens("{}")


def test_a_user_may_be_a_number_and_stops_may_be_many(client: openai.OpenAI) -> None:
    stops = ["zebra", "quagga", "okapi", "gnu", "eland", "mild"]
    plain = client.chat.completions.create(**ASKED)
    more: Any = {"user": 1947, "stop": stops}
    given = client.chat.completions.create(**ASKED, extra_body=more)
    assert given.choices[0].message.content == plain.choices[0].message.content


def test_a_streamed_call_comes_in_the_parts_of_the_api(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        **ASKED, tool_choice=NAMED, parallel_tool_calls=False
    ) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        collected: Any = stream.get_final_completion().choices[0].message.tool_calls
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert not any(delta.content for delta in deltas)
    calls: Any = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 0]
    assert calls[0].id.startswith("call_")
    assert (calls[0].type, calls[0].function.arguments) == ("function", "")
    assert (calls[1].id, calls[1].function.name) == (None, None)
    check_weather(calls[0].function.name, calls[1].function.arguments)
    check_weather(collected[0].function.name, collected[0].function.arguments)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_call_that_is_cut_off_is_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**{**ASKED, "max_tokens": 6}, tool_choice=NAMED)
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert (choice.message.content or "").startswith("<tool_call>")


SCHEMA: Any = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_forced_into_a_schema(client: openai.OpenAI, stream: bool) -> None:
    asked = {**ASKED, "tools": None, "response_format": FORMAT, "temperature": 2, "seed": 4}
    asked["extra_body"] = {"ignore_eos": True}  # the end comes with the last brace
    if stream:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        text, reason = choice.message.content or "", choice.finish_reason
    assert reason == "stop"
    found = json.loads(text)
    assert set(found) == {"ok", "kind"}
    assert isinstance(found["ok"], bool)
    assert found["kind"] in ("a", "b")


def test_a_completion_is_forced_as_well(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="x = ", max_tokens=40, extra_body={"response_format": FORMAT}
    )
    assert set(json.loads(answer.choices[0].text)) == {"ok", "kind"}


def test_an_object_without_a_schema_is_an_object(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_object"}
    answer = client.chat.completions.create(**{**ASKED, "tools": None}, response_format=wanted)
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_a_schema_may_be_deep(client: openai.OpenAI) -> None:
    schema: Any = {"const": 5}
    for _ in range(40):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    asked = {**ASKED, "tools": None, "max_tokens": 300, "response_format": wanted}
    found = json.loads(client.chat.completions.create(**asked).choices[0].message.content or "")
    for _ in range(40):
        found = found["a"]
    assert found == 5


def test_the_memory_of_a_grammar_is_given_back(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_trimmed = Event()
    monkeypatch.setattr(service, "trim_heap", is_trimmed.set)
    client.chat.completions.create(**ASKED)
    assert not is_trimmed.is_set()
    wanted: Any = {"type": "json_object"}
    client.chat.completions.create(**{**ASKED, "tools": None, "response_format": wanted})
    assert is_trimmed.wait(30)


def test_requests_without_a_grammar_do_not_wait_for_one(
    client: openai.OpenAI, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_grammar, may_go, num_inside, most = engine.grammar, Event(), [0], [0]

    def slow(lark: str) -> Grammar:
        num_inside[0] += 1
        most[0] = max(most[0], num_inside[0])
        assert may_go.wait(30)
        num_inside[0] -= 1
        return compile_grammar(lark)

    monkeypatch.setattr(engine, "grammar", slow)
    wanted: Any = {"type": "json_object"}
    asked = {**ASKED, "tools": None, "max_tokens": 4}
    with ThreadPoolExecutor() as threads:
        ask: Any = client.chat.completions.create
        answers = [threads.submit(ask, **asked, response_format=wanted) for _ in range(4)]
        try:
            wait_until(lambda: num_inside[0] > 0, "a grammar")
            assert client.chat.completions.create(**asked).choices[0].message.content
            assert not any(answer.done() for answer in answers)
        finally:
            may_go.set()
        assert all(answer.result().choices[0].message.content for answer in answers)
    assert most == [1]


def test_tools_beside_a_schema_give_a_call_or_the_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED, response_format=FORMAT)
    message = answer.choices[0].message
    if message.tool_calls:
        assert answer.choices[0].finish_reason == "tool_calls"
    else:
        assert set(json.loads(message.content or "")) == {"ok", "kind"}
    refused = client.chat.completions.create(**ASKED, response_format=FORMAT, tool_choice="none")
    assert set(json.loads(refused.choices[0].message.content or "")) == {"ok", "kind"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": FORMAT}, "response_format"),
    ],
)
def test_without_the_library_one_sentence_says_what_to_install(
    served: Running, engine: Engine, monkeypatch: pytest.MonkeyPatch, change: Any, param: str
) -> None:
    tokenizer = engine.tokenizer.own
    monkeypatch.setattr(engine, "_grammars", Grammars(tokenizer, engine.info.vocab_size, [2]))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    answer = httpx.post(f"{served.url}/v1/chat/completions", json={**ASKED, **change})
    error = error_of(answer, 400)
    assert error["param"] == param
    assert error["message"] == (
        f"{param} needs a grammar, but this server has no grammar library; its operator can add "
        f"it: {install_command('grammar')}."
    )


CALLED = '{"city": "Rome", "days": 2}'


@pytest.mark.parametrize(
    ("form", "texts", "others"),
    [
        (
            CallForm.TAGGED,
            [
                f'<tool_call>\n{{"name": "get_weather", "arguments": {CALLED}}}\n</tool_call>',
                (
                    '<tool_call>\n{"name": "odd \\"näme\\"\\n", '
                    '"arguments": {"on": true}}\n</tool_call>'
                ),
            ],
            [
                f'<tool_call>\n{{"name": "other", "arguments": {CALLED}}}\n</tool_call>',
                '<tool_call>\n{"name": "get_weather", "arguments": {"on": true}}\n</tool_call>',
                f'{{"name": "get_weather", "parameters": {CALLED}}}',
            ],
        ),
        (
            CallForm.BARE,
            [
                f'{{"name": "get_weather", "parameters": {CALLED}}}',
                '{"name": "odd \\"näme\\"\\n", "parameters": {"on": false}}',
            ],
            [
                f'{{"name": "get_weather", "arguments": {CALLED}}}',
                f'<tool_call>\n{{"name": "get_weather", "arguments": {CALLED}}}\n</tool_call>',
            ],
        ),
    ],
)
def test_the_grammar_of_calls_is_what_the_reader_reads(
    engine: Engine, form: CallForm, texts: list[str], others: list[str]
) -> None:
    tools = parse_tools([WEATHER, ODD])
    grammar = engine.grammar(grammar_of_answer(None, form, tools, ToolChoice("required"), True))
    for text in texts:
        matcher, reader = grammar.matcher(), CallReader(form)
        for token_id in engine.tokenizer.encode(text):
            assert matcher.allowed(engine.info.vocab_size)[token_id], text
            matcher.accept(token_id)
        assert matcher.is_complete
        assert reader.push(text)[1] + reader.finish()[1], text
    for text in others:
        matcher = grammar.matcher()
        for token_id in engine.tokenizer.encode(text):
            matcher.accept(token_id)
        assert matcher.error, text
