"""Hints of clients reach the engine."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator

import openai
import pytest

from kvtier.core.config import CacheConfig
from kvtier.core.hints import Hint, Retain
from kvtier.core.types import DEVICE
from kvtier.serve.engine import Engine, EngineConfig
from tests.serve.server.conftest import MODEL, Running, running

Ask = Callable[..., int]
WORDS = 60


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """Run a server whose host tier has room for about two prompts."""
    config = EngineConfig(
        model=MODEL,
        block_size=16,
        chunk_tokens=16,
        device_capacity="8MiB",
        threads=1,
        cache=CacheConfig(host_capacity="1MiB", strict=True),
    )
    with Engine(config) as engine, running(engine) as made:
        yield made


def ask(small: Running, word: str, **extra: object) -> int:
    """Run a prompt. Return how many of its tokens were cached."""
    with small.client() as client:
        usage = client.completions.create(
            model=MODEL, prompt=f"{word} " * WORDS, max_tokens=1, extra_body=extra
        ).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert small.engine.drain()
    return usage.prompt_tokens_details.cached_tokens or 0


def flood(small: Running, salt: str) -> None:
    for number in range(12):
        ask(small, f"other{number}", cache_salt=salt)
    small.engine.clear_tier(DEVICE)


@pytest.mark.parametrize("hint", [{"back_in_s": 600}, {"retain": [{"priority": 90}]}, None])
def test_after_a_flood_a_conversation_is_there_if_its_client_said_so(
    small: Running, hint: dict[str, object] | None
) -> None:
    salt = str(hint)
    ask(small, "talk", cache_salt=salt, kvtier=hint)
    flood(small, salt)
    assert (ask(small, "talk", cache_salt=salt) > 0) == (hint is not None)


def test_a_chat_says_it_as_well(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    submit = small.engine.submit

    def noted(*arguments: object, **named: object) -> object:
        heard.append(named["hint"])
        return submit(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(small.engine, "submit", noted)
    said = {"retain": [{"first_token": 0, "last_token": 100, "priority": 90}], "ended": True}
    with openai.OpenAI(base_url=f"{small.url}/v1", api_key="none") as client:
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=1,
            extra_body={"kvtier": said},
        )
    assert heard == [Hint((Retain(90, 0, 100),), ended=True)]


@pytest.mark.slow
def test_an_orchestrators_envelope_counts_unless_the_client_said_more(small: Running) -> None:
    def envelope(kind: str) -> dict[str, object]:
        action = {"action_id": "1", "action_version": "1.0", "action_type": kind}
        actions = [{**action, "payload": {"back_in_s": 600}}]
        return {"protocol_version": "0.1", "message_id": "1", "actions": actions}

    for kind, own, is_kept in (
        ("kvtier.hint", None, True),
        ("kvtier.hint", {"ended": True}, False),
        ("another.hint", None, False),
    ):
        salt = f"{kind} {own}"
        ask(small, "talk", cache_salt=salt, kv_hints=envelope(kind), kvtier=own)
        flood(small, salt)
        assert (ask(small, "talk", cache_salt=salt) > 0) == is_kept, salt
    with urllib.request.urlopen(f"{small.url}/metrics", timeout=30) as answer:
        told = answer.read().decode()
    assert 'kvtier_server_hint_actions_total{action="kvtier.hint"} 2.0' in told
    assert 'kvtier_server_hint_actions_total{action="unknown"} 1.0' in told
