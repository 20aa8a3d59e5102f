"""Effects of the cache on a client: cached tokens, equal text, no other client's data."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types import Completion

from kvtier.serve.engine import Engine

from .conftest import MODEL, cached

pytestmark = pytest.mark.engine


def complete(client: openai.OpenAI, prompt: str, salt: str) -> Completion:
    return client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=20, temperature=0, extra_body={"cache_salt": salt}
    )


def test_the_second_request_reuses_the_prefix_and_says_the_same(
    client: openai.OpenAI, engine: Engine, prefix: str
) -> None:
    cold = complete(client, prefix + "def last(", salt="reuse")
    warm = complete(client, prefix + "def last(", salt="reuse")
    assert cold.usage is not None
    assert cold.usage.prompt_tokens > 3 * 128
    assert cached(cold.usage) == 0
    grid = engine.info.chunk_tokens
    assert cached(warm.usage) == (cold.usage.prompt_tokens - 1) // grid * grid
    assert warm.choices[0].text == cold.choices[0].text


def test_another_salt_reuses_nothing(client: openai.OpenAI, prefix: str) -> None:
    mine = complete(client, prefix, salt="tenant a")
    theirs = complete(client, prefix, salt="tenant b")
    assert cached(theirs.usage) == 0
    assert theirs.choices[0].text == mine.choices[0].text
    assert cached(complete(client, prefix, salt="tenant b").usage) > 0


def test_a_chat_reuses_its_first_turns(client: openai.OpenAI, prefix: str) -> None:
    turns: Any = [{"role": "user", "content": prefix}]
    salt = {"cache_salt": "chat"}
    first = client.chat.completions.create(
        model=MODEL, messages=turns, max_tokens=8, temperature=0, extra_body=salt
    )
    turns += [
        {"role": "assistant", "content": first.choices[0].message.content or ""},
        {"role": "user", "content": "Go on."},
    ]
    *_, last = client.chat.completions.create(
        model=MODEL,
        messages=turns,
        max_tokens=8,
        extra_body=salt,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert cached(first.usage) == 0
    assert cached(last.usage) >= 3 * 128
