"""/v1/chat/completions through the openai client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from .conftest import MODEL, Running

pytestmark = pytest.mark.engine

MESSAGES: Any = [
    {"role": "system", "content": "You explain Python."},
    {"role": "user", "content": "What does argparse do?"},
]


def chat(client: openai.OpenAI, **given: Any) -> Any:
    """Return the answer to a greedy request of 20 tokens, with other fields as given."""
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20, "temperature": 0, **given}
    return client.chat.completions.create(**asked)


def greedy(client: openai.OpenAI, **given: Any) -> str:
    content: str = chat(client, **given).choices[0].message.content
    return content


def test_an_answer_has_the_shape_of_the_api(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=None, max_completion_tokens=4)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 4
    assert answer.usage.prompt_tokens_details is not None


def test_a_stream_brings_role_text_end_and_usage(client: openai.OpenAI) -> None:
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == greedy(client)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert len({chunk.id for chunk in (*chunks, last)}) == 1
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_text_parts_and_the_newer_role_are_the_same_conversation(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": text} for text in ("What does ", "argparse do?")]
    turns = [{**MESSAGES[0], "role": "developer"}, {"role": "user", "content": parts}]
    assert greedy(client, messages=turns) == greedy(client)


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    said = chat(client, max_tokens=5).choices[0].message.model_dump()
    assert "tool_calls" in said
    turns = [*MESSAGES, said, {"role": "user", "content": "And then?"}]
    assert chat(client, messages=turns, max_tokens=2).choices


def test_logprobs_name_every_token(client: openai.OpenAI) -> None:
    [choice] = chat(client, max_tokens=6, logprobs=True, top_logprobs=2).choices
    content = choice.logprobs.content
    assert len(content) == 6
    assert "".join(each.token for each in content) == choice.message.content
    for each in content:
        assert each.bytes == list(each.token.encode())
        assert len(each.top_logprobs) == 2
        assert each.top_logprobs[0].logprob == each.logprob
        assert each.top_logprobs[0].logprob >= each.top_logprobs[1].logprob


def test_a_stop_is_cut_off(client: openai.OpenAI) -> None:
    whole = greedy(client)
    [choice] = chat(client, stop=whole[3:6]).choices
    assert choice.message.content == whole[: whole.find(whole[3:6])]
    assert choice.finish_reason == "stop"


def test_choices_of_a_stream_each_have_a_role_and_an_end(client: openai.OpenAI) -> None:
    roles, ends = [], []
    for chunk in chat(client, max_tokens=4, n=3, stream=True):
        for choice in chunk.choices:
            roles += [choice.index] if choice.delta.role else []
            ends += [choice.index] if choice.finish_reason else []
    assert sorted(roles) == sorted(ends) == [0, 1, 2]


def test_a_stream_is_server_sent_events_that_end_with_done(served: Running) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 3, "stream": True}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    for event in events[:-1]:
        chunk = json.loads(event.removeprefix("data: "))
        assert chunk["object"] == "chat.completion.chunk"
        assert "usage" not in chunk
    assert answer.headers["x-request-id"] == chunk["id"]
