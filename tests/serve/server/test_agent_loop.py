"""An agent's loop by OpenAI's client: each turn reuses the KV of the turn before.

The built-in model is far too small to decide on a call. ``tool_choice="required"`` makes its
answers follow the grammar of a call; the model only chooses the tool and its arguments.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from .conftest import MODEL

pytestmark = pytest.mark.engine

MODULES = ("json", "textwrap", "bisect")
NUM_CALLS = 3


def read_source(module: str, part: str) -> str:
    """Return the first or last 30 lines of a module of the standard library."""
    text = inspect.getsource(__import__(module))
    lines = text.splitlines()
    return "\n".join(lines[:30] if part == "begin" else lines[-30:])


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "read_source",
            "description": "Read the beginning or the end of a Python module.",
            "parameters": {
                "type": "object",
                "properties": {
                    "module": {"type": "string", "enum": list(MODULES)},
                    "part": {"type": "string", "enum": ["begin", "end"]},
                },
                "required": ["module", "part"],
                "additionalProperties": False,
            },
        },
    }
]


def whole(client: openai.OpenAI, asked: Any) -> tuple[Any, Any]:
    answer = client.chat.completions.create(**asked)
    message = answer.choices[0].message.model_dump(exclude_none=True)
    return message, answer.usage


def streamed(client: openai.OpenAI, asked: Any) -> tuple[Any, Any]:
    """Return message and usage of a stream, assembled as agents do."""
    text, calls, usage = "", [], None
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options=options):
        usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                if part.id:
                    calls.append(part.model_dump(exclude_none=True, exclude={"index"}))
                else:
                    calls[part.index]["function"]["arguments"] += part.function.arguments
    message = {"role": "assistant", "content": text or None, "tool_calls": calls}
    return message, usage


@pytest.mark.parametrize("ask", [whole, streamed])
def test_three_calls_and_an_answer_reuse_their_own_prefix(
    client: openai.OpenAI, ask: Callable[[openai.OpenAI, Any], tuple[Any, Any]]
) -> None:
    messages: Any = [
        {"role": "system", "content": f"You answer questions on Python ({ask.__name__})."},
        {"role": "user", "content": "What do these modules do?"},
    ]
    prompts, cached = [], []
    for turn in range(NUM_CALLS + 1):
        message, usage = ask(
            client,
            {
                "model": MODEL,
                "messages": messages,
                "tools": TOOLS,
                "tool_choice": "required" if turn < NUM_CALLS else "none",
                "parallel_tool_calls": False,
                "temperature": 0,
                "max_tokens": 80,
                "extra_body": {"cache_salt": ask.__name__},
            },
        )
        prompts.append(usage.prompt_tokens)
        cached.append(usage.prompt_tokens_details.cached_tokens)
        messages.append(message)
        for call in message.get("tool_calls") or []:
            assert call["function"]["name"] == "read_source"
            result = read_source(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    assert [message["role"] for message in messages[2:]] == ["assistant", "tool"] * 3 + [
        "assistant"
    ]
    assert messages[-1]["content"]
    # All whole chunks of a turn's prompt are found in the next.
    assert cached == [0, *(tokens // 128 * 128 for tokens in prompts[:-1])]
    assert cached == sorted(set(cached))
