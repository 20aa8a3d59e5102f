"""Every error: its status, the API's shape, and one sentence with the remedy."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from kvtier.serve.engine import (
    Completion,
    Engine,
    EngineConfig,
    RequestError,
    RequestHandle,
    SamplingParams,
    Token,
)
from kvtier.serve.server.config import ServerConfig
from kvtier.serve.server.refused import HARMLESS, LABELS
from kvtier.serve.server.schemas import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
)
from tests.kit.waiting import wait_until

from .conftest import MODEL, Running, running
from .raw import error_of

pytestmark = pytest.mark.engine

COMPLETION: Any = {"model": MODEL, "prompt": "import", "max_tokens": 2}
CHAT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


JSON = {"Content-Type": "application/json"}


def post(served: Running, path: str, **content: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/{path}", timeout=60, **content)


def called(arguments: object) -> Any:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def function(name: str, parameters: Any = None) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def in_schema(schema: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def assistant(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "assistant", **fields}]}


def user(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", **fields}]}


BAD_COMPLETIONS = [
    ({"prompt": None}, "prompt", "prompt is null, but must be a text"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": []}, "prompt", "must be a text, a list of texts"),
    ({"prompt": [[]]}, "prompt", "prompt is empty"),
    ({"prompt": ["a", 1]}, "prompt", 'prompt is ["a", 1]'),
    ({"prompt": [True]}, "prompt", "prompt is [true]"),
    ({"prompt": [10**6]}, None, "token ids outside 0 .. 4095"),
    ({"prompt": [-1]}, None, "token ids outside 0 .. 4095"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens is -1, but must be greater than or equal to 0"),
    ({"max_tokens": 2.5}, "max_tokens", "max_tokens is 2.5, but must be a valid integer"),
    ({"max_tokens": "3"}, "max_tokens", 'max_tokens is "3", but must be a valid integer'),
    (
        {"temperature": 2.1},
        "temperature",
        "temperature is 2.1, but must be less than or equal to 2",
    ),
    ({"temperature": -1}, "temperature", "temperature is -1, but must be greater than"),
    ({"top_p": 0}, "top_p", "top_p is 0, but must be greater than 0"),
    ({"top_k": -2}, "top_k", "top_k is -2, but must be greater than or equal to -1"),
    ({"n": 17}, "n", "n is 17, but must be less than or equal to 16"),
    ({"seed": 2**64}, "seed", "seed is 18446744073709551616, but must be less than"),
    ({"stop": 5}, "stop", "stop is 5, but must be a text or a list of texts"),
    ({"stop": ["a"] * 65}, "stop", "stop has 65 texts; give at most 64"),
    ({"stop": ["a" * 1000] * 5}, "stop", "stop has 5000 characters together; give at most 4096"),
    ({"stop": [""]}, "stop", "stop has a text of 0 characters"),
    ({"logprobs": 21}, "logprobs", "logprobs is 21, but must be less than or equal to 20"),
    ({"stream": "yes"}, "stream", 'stream is "yes", but must be a valid boolean'),
    ({"stream_options": {"include_usage": True}}, "stream_options", "given without stream"),
    (
        {"stream_options": {"include_use": True}, "stream": True},
        "stream_options.include_use",
        '"stream_options.include_use" is no parameter of this request; did you mean include_usage?',
    ),
    (
        {"stream_options": {"every": 5}, "stream": True},
        "stream_options.every",
        '"stream_options.every" is no parameter of this request; leave it out.',
    ),
    ({"cache_salt": 5}, "cache_salt", "cache_salt is 5, but must be a valid string"),
    ({"kvtier": 5}, "kvtier", "kvtier is 5, but must be an object of retain, back_in_s, ended"),
    (
        {"kvtier": {"end": True}},
        "kvtier",
        "kvtier has 'end', but may have retain, back_in_s, ended",
    ),
    ({"kvtier": {"ended": 1}}, "kvtier", "ended is 1, but must be true or false"),
    ({"kvtier": {"retain": 1}}, "kvtier", "retain is 1, but must be a list of objects"),
    ({"kvtier": {"retain": [{}]}}, "kvtier", "a range without a priority; give one of 0 to 100"),
    (
        {"kvtier": {"retain": [{"priority": 101}]}},
        "kvtier",
        "priority is 101, but must be a whole number in 0 .. 100",
    ),
    (
        {"kvtier": {"retain": [{"priority": 90, "first_token": 5, "last_token": 5}]}},
        "kvtier",
        "last_token is 5, but must be above first_token, which is 5",
    ),
    (
        {"kvtier": {"retain": [{"priority": 90, "ttl_s": 1e6}]}},
        "kvtier",
        "ttl_s is 1000000.0, but must be a number of seconds above 0, 86400 at most",
    ),
    ({"kvtier": {"retain": [{"priority": 9}] * 17}}, "kvtier", "17 ranges; give at most 16"),
    ({"kvtier": {"back_in_s": "5"}}, "kvtier", "back_in_s is '5', but must be a number of"),
    ({"kvtier": {"back_in_s": 5, "ended": True}}, "kvtier", "say two things; give one of them"),
    ({"best_of": 2}, "best_of", "best_of=2 is not supported by this server; leave it out"),
    ({"suffix": "x"}, "suffix", 'suffix="x" is not supported'),
    ({"suffix": "x"}, "suffix", "or serve the model with vLLM or SGLang"),
    ({"logit_bias": {"x": 1}}, "logit_bias", 'logit_bias has the key "x", but keys must be token'),
    ({"logit_bias": {"5": 101}}, "logit_bias", "of token 5 is 101, but must be a number in -100"),
    ({"logit_bias": {"5": True}}, "logit_bias", "of token 5 is true, but must be a number in"),
    ({"logit_bias": {"4096": 1}}, None, "name the token id 4096, which is outside 0 .. 4095"),
    ({"logit_bias": [1]}, "logit_bias", "logit_bias is [1], but must be an object of token ids"),
    ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty is 2.5, but must be less"),
    ({"repetition_penalty": 0}, "repetition_penalty", "is 0, but must be greater than 0"),
    ({"min_p": 2}, "min_p", "min_p is 2, but must be less than or equal to 1"),
    ({"min_tokens": 3}, None, "min_tokens is 3; it must lie between 0 and max_tokens, which is 2."),
    ({"stop_token_ids": ["x"]}, "stop_token_ids", "must be a list of at most 64 token ids"),
    ({"stop_token_ids": [9999]}, None, "name the token id 9999, which is outside 0 .. 4095"),
    ({"response_format": {"type": "xml"}}, "response_format", "for others use vLLM or SGLang"),
    ({"response_format": "json"}, "response_format", 'is of type "json"; this server knows text'),
    ({"response_format": {"type": "json_schema"}}, "response_format", "has no schema; send"),
    (in_schema({"const": "\ud800"}), "response_format", "has half of a surrogate pair; send whole"),
    (in_schema({"\ud800": 1}), "response_format", "has half of a surrogate pair; send whole"),
    (
        in_schema({"type": "object", "unevaluatedProperties": False}),
        "response_format",
        "can't force answers into: failed to compile JSON schema: Unimplemented keys: [",
    ),
    (
        in_schema({"type": "string", "pattern": "^(a{1000}){1000}$"}),
        "response_format",
        "can't force answers into: lexer error: too many expressions constructed.",
    ),
    (in_schema({"type": "\x00"}), "response_format", r"Invalid type: \x00"),
    (
        {"response_format": {"type": "json_object"}, "min_tokens": 1},
        None,
        "min_tokens is given with a grammar",
    ),
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ({"xyzzy": 1}, "xyzzy", '"xyzzy" is no parameter of this request; leave it out'),
]

BAD_CHATS = [
    ({"messages": []}, "messages", "messages is [], but"),
    ({"messages": "hi"}, "messages", 'messages is "hi", but must be a valid list'),
    (user(), "messages[0].content", "is missing; this request needs it"),
    ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", 'role is "king", but'),
    (
        user(content=[{"type": "image_url", "image_url": "x"}]),
        "messages[0].content",
        'content has a part of type "image_url"',
    ),
    ({"messages": [{"role": "tool"}]}, "messages[0].content", "is missing; this request needs it"),
    (
        assistant(content="x", tool_calls=[{"id": "1"}]),
        "messages[0].tool_calls",
        'tool_calls has {"id": "1"}; a call is {"id": ...',
    ),
    (
        assistant(tool_calls=[called(5)]),
        "messages[0].tool_calls",
        "tool_calls has the arguments 5, but they must be a JSON object, as text",
    ),
    (
        user(content="x", tool_calls=[called("{}")]),
        "messages[0].tool_calls",
        "belongs to a message of the assistant, but this one is of the user.",
    ),
    (
        user(content="x", tool_call_id="1"),
        "messages[0].tool_call_id",
        "belongs to a message of the tool, but this one is of the user.",
    ),
    (assistant(content="x", prefix=True), "messages[0].prefix", "prefix is not supported"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, but must be greater than or equal to 1"),
    ({"tools": {}}, "tools", "tools is {}, but must be a list of functions"),
    ({"tools": [{"type": "function"}]}, "tools", 'tools has one of type "function"'),
    ({"tools": [{"type": "custom"}]}, "tools", "only: for others use vLLM or SGLang."),
    ({"tools": [function("")]}, "tools", 'with the name "", but it must be a text of 1 to 128'),
    ({"tools": [function("f", 5)]}, "tools", "the parameters 5, but they must be a JSON schema"),
    ({"tool_choice": "required"}, "tool_choice", "asks for a call, but there are no tools."),
    ({"tool_choice": "any"}, "tool_choice", 'tool_choice is "any", but must be "none", "auto"'),
    (
        {"tools": [function("f")], "tool_choice": function("g")},
        "tool_choice",
        'tool_choice names "g", which is none of the tools.',
    ),
    (
        {"tools": [function("f", {"type": "objec"})], "tool_choice": "required"},
        "tool_choice",
        "tool_choice has a schema that this server can't force answers into",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "serve the model with vLLM or SGLang"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs", "is 5, but must be an object"),
    (
        {"chat_template_kwargs": {"chat_template": "x"}},
        "messages",
        "chat_template is no variable of templates.",
    ),
    ({"reasoning_effort": "high"}, "reasoning_effort", 'reasoning_effort="high" is not supported'),
    ({"top_logprobs": 2}, "top_logprobs", "given without logprobs"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "give one of them"),
]


NEEDED = {"model", "prompt", "messages"}


@pytest.mark.parametrize(
    ("path", "schema", "asked"),
    [("completions", CompletionRequest, COMPLETION), ("chat/completions", ChatRequest, CHAT)],
)
def test_null_is_the_same_as_leaving_a_parameter_out(
    served: Running, path: str, schema: type[GenerationRequest], asked: dict[str, object]
) -> None:
    names = {*schema.model_fields, *LABELS, *HARMLESS, "guided_json", "xyzzy"} - NEEDED
    given = {**dict.fromkeys(names), **asked, "temperature": 0}
    inner = dict.fromkeys([*StreamOptions.model_fields, "xyzzy"])
    hint = dict.fromkeys(["retain", "back_in_s", "ended", "xyzzy"])
    expected = post(served, path, json={**asked, "temperature": 0}).json()["choices"]
    assert post(served, path, json=given).json()["choices"] == expected
    given |= {"stream": True, "stream_options": inner, "kvtier": hint}
    assert post(served, path, json=given).status_code == 200


def test_defaults_of_other_engines_change_nothing(served: Running) -> None:
    """Routers write out what their engines would do anyway."""
    given = {name: value for name, values in HARMLESS.items() for value in values}
    given |= {"no_stop_trim": False, "guided_json": "", "lora_path": None, "xyzzy": []}
    assert post(served, "completions", json={**COMPLETION, **given}).status_code == 200
    assert post(served, "completions", json={**COMPLETION, "priority": False}).status_code == 200
    asked = [("xyzzy", 0), ("skip_special_tokens", 1), ("skip_special_tokens", False)]
    asked += [("add_generation_prompt", False), ("priority", True)]
    for name, value in asked:
        answer = post(served, "completions", json={**COMPLETION, name: value})
        assert answer.status_code == 400, name


@pytest.mark.parametrize(
    ("path", "asked", "change", "param", "sentence"),
    [
        *(("completions", COMPLETION, *each) for each in BAD_COMPLETIONS),
        *(("chat/completions", CHAT, *each) for each in BAD_CHATS),
    ],
)
def test_a_bad_request_is_told_why(
    served: Running, path: str, asked: Any, change: Any, param: str | None, sentence: str
) -> None:
    body = json.dumps({**asked, **change}).encode()  # in ASCII: it may have half a character
    error = error_of(post(served, path, content=body, headers=JSON), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert sentence in error["message"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "not valid JSON at character 1"),
        (b'{"model": "kvtier-tiny",}', "not valid JSON at character"),
        (b"\xff\xfe{", "can't be read as JSON"),
        (b"[" * 100_000, "more than 128 levels of lists and objects; flatten it"),
        (b"[]", "must be a JSON object"),
        (b"7", "must be a JSON object"),
        (b"", "body is empty"),
        (b'{"model": "kvtier-tiny", "prompt": "x", "temperature": NaN}', "temperature is NaN"),
        (b'{"model": "kvtier-tiny", "prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"model": "\\ud800", "prompt": "x"}', "model has half of a surrogate pair"),
        (
            b'{"model": "kvtier-tiny", "prompt": "x", "cache_salt": "a\\udfff"}',
            "cache_salt has half of a surrogate pair at character 1",
        ),
        (b'{"model": "kvtier-tiny", "prompt": "x", "\\ud800": 1}', "A key in the body is no text"),
        (b'{"prompt": "x"}', "model is missing"),
    ],
)
def test_a_body_that_is_no_request_is_told_why(served: Running, body: bytes, sentence: str) -> None:
    error = error_of(post(served, "completions", content=body, headers=JSON), 400)
    assert sentence in error["message"]


def test_a_body_that_does_not_say_it_is_json_is_told_so(served: Running) -> None:
    body = json.dumps(COMPLETION).encode()
    error = error_of(post(served, "completions", content=body), 400)
    assert 'sent with the header "Content-Type: application/json"' in error["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "n": None, "stop": None},
        {"best_of": 1, "suffix": None, "logit_bias": {}, "presence_penalty": 0.0},
        {"response_format": {"type": "text"}, "repetition_penalty": 1, "min_p": 0, "max_tokens": 0},
        {"temperature": None, "top_p": None, "seed": None, "stream": None, "max_tokens": None},
    ],
)
def test_what_changes_nothing_is_accepted(served: Running, change: dict[str, object]) -> None:
    assert post(served, "completions", json={**COMPLETION, **change}).status_code == 200


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"
    assert 'no model "gpt-9"; this server serves "kvtier-tiny"' in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("some/other")


def test_unknown_paths_and_methods_have_the_same_shape(served: Running) -> None:
    missing = error_of(httpx.get(f"{served.url}/v2/nothing"), 404)
    assert "/v1/chat/completions" in missing["message"]
    answer = httpx.get(f"{served.url}/v1/completions")
    assert "use POST" in error_of(answer, 405)["message"]
    assert answer.headers["allow"] == "POST"


@pytest.fixture(scope="module")
def short() -> Iterator[Running]:
    """Run a server with room for 100 tokens of prompt and answer."""
    config = EngineConfig(model=MODEL, device_capacity="8MiB", threads=1, max_model_tokens=100)
    with Engine(config) as engine, running(engine) as made:
        yield made


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"prompt": [5] * 100},
            "The prompt has 100 tokens, but prompt and answer must fit into 100",
        ),
        ({"prompt": [5] * 90, "max_tokens": 11}, "together 101, but they must fit into 100"),
        (
            {"prompt": "word " * 800},
            "of which the first 1600 alone are more than the 100 tokens",
        ),
        (
            {"prompt": "word " * 2000},
            "has 10000 bytes, but the 100 tokens that prompt and answer must fit into hold 4100",
        ),
        (
            {"prompt": "word " * 20_000},
            "The body has a text of more than 24600 bytes, which is more than the context can hold",
        ),
    ],
)
def test_what_does_not_fit_the_context_is_refused(
    short: Running, change: dict[str, object], sentence: str
) -> None:
    error = error_of(post(short, "completions", json={**COMPLETION, **change}), 400)
    assert error["code"] == "context_length_exceeded"
    assert sentence in error["message"]


@pytest.mark.parametrize(
    ("capacity", "most", "note"),
    [
        ("2MiB", 0, " The limit of 384 tokens is set by device_capacity; the model takes 8192."),
        ("2MiB", 300, " The limit of 300 tokens is set by max_model_tokens; the model takes 8192."),
        ("64MiB", 0, "shorten the prompt or lower max_tokens."),
    ],
)
def test_a_context_error_says_which_setting_made_the_limit(
    capacity: str, most: int, note: str
) -> None:
    config = EngineConfig(
        model=MODEL, device_capacity=capacity, threads=1, max_model_tokens=most, prefix_cache=False
    )
    with Engine(config) as engine, running(engine) as made:
        asked = {**COMPLETION, "prompt": [5] * 90, "max_tokens": 9000}
        error = error_of(post(made, "completions", json=asked), 400)
        assert error["message"].endswith(note)
        with pytest.raises(RequestError) as caught:
            engine.submit([5] * 90, SamplingParams(max_tokens=9000))
        assert str(caught.value).endswith(note)


def test_the_last_token_of_room_may_be_used(short: Running) -> None:
    with short.client() as client:
        exact = client.completions.create(
            model=MODEL, prompt=[5] * 90, max_tokens=10, extra_body={"ignore_eos": True}
        )
        chat = client.chat.completions.create(
            model=MODEL, messages=CHAT["messages"], extra_body={"ignore_eos": True}
        )
    assert exact.usage is not None
    assert chat.usage is not None
    assert exact.usage.total_tokens == chat.usage.total_tokens == 100


# -- keys and bodies ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(engine: Engine) -> Iterator[Running]:
    with running(engine, ServerConfig(api_key="right-key", max_body_bytes=2000)) as made:
        yield made


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        ({}, "API key is missing"),
        ({"Authorization": "Bearer wrong-key"}, "API key is wrong"),
        ({"Authorization": "Bearer"}, "API key is missing"),
        ({"Authorization": "Bearer right-key2"}, "API key is wrong"),
        ({"Authorization": "Basic right-key"}, "API key is wrong"),
        ({"Authorization": "right-key"}, "API key is missing"),
        ({"Authorization": b"Bearer \xff\xfe"}, "API key is wrong"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/nothing", "/openapi.json"])
def test_without_the_key_nothing_is_served(
    guarded: Running, headers: dict[str, str], sentence: str, path: str
) -> None:
    answer = httpx.get(f"{guarded.url}{path}", headers=headers)
    error = error_of(answer, 401)
    assert error["code"] == "invalid_api_key"
    assert sentence in error["message"]
    assert "right-key" not in answer.text


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_above_the_limit_is_refused(guarded: Running, is_chunked: bool) -> None:
    headers = {**JSON, "Authorization": "Bearer right-key"}

    def long_body() -> Iterator[bytes]:
        for _ in range(300):
            yield b"x" * 10_000

    content = long_body() if is_chunked else b"x" * 3_000_000
    error = error_of(post(guarded, "completions", content=content, headers=headers), 413)
    assert "longer than 2000 bytes" in error["message"]
    for length, status in ((2000, 200), (2001, 413)):
        body = json.dumps(COMPLETION).encode().ljust(length)
        assert post(guarded, "completions", content=body, headers=headers).status_code == status


# -- failures of the server itself ----------------------------------------------------------------


class StandIn:
    """The real engine with overridden methods that fail."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


class FailsAfterTwoTokens(StandIn):
    """An engine whose requests all fail after their tokens."""

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        salt: str,
        on_token: Callable[[Token], None],
        on_done: Callable[[Completion], None],
        **rest: object,
    ) -> RequestHandle:
        def fail(completion: Completion) -> None:
            on_done(replace(completion, finish_reason="error", error="The model broke."))

        return self._engine.submit(
            prompt, replace(params, max_tokens=2), salt=salt, on_token=on_token, on_done=fail
        )


class BreaksOnSubmit(StandIn):
    """An engine with a defect whose message quotes the request."""

    def submit(self, prompt: list[int], params: SamplingParams, **rest: object) -> RequestHandle:
        raise KeyError(self._engine.tokenizer.decode(prompt))


def test_a_failure_before_the_end_is_a_500(engine: Engine) -> None:
    with running(FailsAfterTwoTokens(engine)) as made, made.client() as client:
        with pytest.raises(openai.InternalServerError, match="The model broke") as caught:
            client.completions.create(**COMPLETION)
        assert caught.value.status_code == 500
        assert caught.value.code == "engine_error"


@pytest.mark.parametrize(
    ("path", "asked"), [("completions", COMPLETION), ("chat/completions", CHAT)]
)
def test_a_failure_in_a_stream_ends_it_properly(
    engine: Engine, path: str, asked: dict[str, object]
) -> None:
    with running(FailsAfterTwoTokens(engine)) as made:
        answer = post(made, path, json={**asked, "stream": True, "ignore_eos": True})
        assert answer.status_code == 200
        *chunks, failure, done = answer.text.strip().split("\n\n")
        assert len(chunks) >= 2
        assert done == "data: [DONE]"
        assert json.loads(failure.removeprefix("data: "))["error"]["message"] == "The model broke."
        metrics = httpx.get(f"{made.url}/metrics").text
        assert 'status="500"} 1.0' in metrics
        with made.client() as client, pytest.raises(openai.APIError, match="The model broke"):
            list(client.completions.create(**COMPLETION, stream=True))


def test_a_defect_is_a_500_and_its_text_stays_inside(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with running(BreaksOnSubmit(engine)) as made:
        answer = post(made, "completions", json={**COMPLETION, "prompt": "plugh"})
        error = error_of(answer, 500)
        assert error["type"] == "server_error"
        assert answer.headers["x-request-id"] in error["message"]
        assert httpx.get(f"{made.url}/health").status_code == 200
    assert "KeyError" in caplog.text
    assert answer.headers["x-request-id"] in caplog.text
    assert "plugh" not in caplog.text + answer.text


@pytest.mark.parametrize("sent", ["9f3c-42", "Root=1-67891233-abcdef01", "a" * 128])
def test_a_clients_request_id_is_kept(
    served: Running, sent: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kvtier")
    answer = post(served, "completions", json=COMPLETION, headers={"X-Request-Id": sent})
    assert answer.headers.get_list("x-request-id") == [sent]
    assert answer.json()["id"] == f"cmpl-{sent}"
    wait_until(lambda: f"request id=cmpl-{sent} " in caplog.text, "the request is logged")


@pytest.mark.parametrize("sent", ["", "a" * 129, "two words", 'a"b', "id\x1b[31m", "caf\xe9"])
def test_a_request_id_that_is_no_id_is_replaced(
    served: Running, sent: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kvtier")
    headers = {"X-Request-Id": sent.encode("latin-1")}
    answer = post(served, "completions", json=COMPLETION, headers=headers)
    if answer.status_code == 400:  # the HTTP parser refuses control characters
        return
    (made,) = answer.headers.get_list("x-request-id")
    assert re.fullmatch("cmpl-[0-9a-f]{32}", made)
    assert answer.json()["id"] == made
    wait_until(lambda: f"request id={made} " in caplog.text, "the request is logged")
    assert not sent or sent not in caplog.text


def test_prompts_and_keys_are_never_logged(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with running(engine, ServerConfig(api_key="frobozz-key")) as made:
        for key in ("frobozz-key", "frobozz-wrong"):
            headers = {"Authorization": f"Bearer {key}"}
            for asked in (
                {**COMPLETION, "prompt": "plugh prompt"},
                {**COMPLETION, "prompt": "plugh prompt", "temperature": 7},
                {**COMPLETION, "prompt": ["plugh prompt", 1]},
                {**COMPLETION, "cache_salt": "plugh salt", "stream": True},
            ):
                post(made, "completions?key=plugh", json=asked, headers=headers)
    ours = "".join(
        record.getMessage() for record in caplog.records if not record.name.startswith("http")
    )
    assert "endpoint=completions" in ours
    assert "plugh" not in ours
    assert "frobozz" not in ours
