"""Many clients, full queues, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kvtier.serve.engine import Engine, EngineConfig
from kvtier.serve.server.config import ServerConfig
from tests.kit.waiting import wait_until

from .conftest import MODEL, Running, busy, running
from .raw import COMPLETIONS, connect, head, read, request, samples

pytestmark = pytest.mark.engine

ENDLESS: Any = {"max_tokens": 7000, "extra_body": {"ignore_eos": True}}
"""Options of a request that runs for minutes unless it is aborted."""


@pytest.fixture(scope="module")
def narrow() -> Iterator[Running]:
    """Run a server that runs one request and queues one."""
    config = EngineConfig(
        model=MODEL, device_capacity="48MiB", threads=1, max_running=1, max_queue=1
    )
    with Engine(config) as engine, running(engine) as made:
        yield made


def is_idle(engine: Engine) -> bool:
    return engine.num_running == engine.num_waiting == 0


def test_32_clients_at_once_get_their_answers(served: Running, prefix: str) -> None:
    async def ask(client: openai.AsyncOpenAI, at: int) -> tuple[int, int]:
        stream = await client.completions.create(
            model=MODEL,
            prompt=f"{prefix}# {at}\n",
            max_tokens=5 + at % 7,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        num_ends = num_tokens = 0
        async for chunk in stream:
            num_ends += sum(choice.finish_reason == "length" for choice in chunk.choices)
            num_tokens = chunk.usage.completion_tokens if chunk.usage else 0
        return num_ends, num_tokens

    async def ask_all() -> list[tuple[int, int]]:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(*(ask(client, at) for at in range(32)))

    assert asyncio.run(ask_all()) == [(1, 5 + at % 7) for at in range(32)]
    assert served.engine.drain()
    assert is_idle(served.engine)


def test_a_full_queue_answers_429_and_keeps_nothing(narrow: Running) -> None:
    engine = narrow.engine
    asked: Any = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    with narrow.client() as client:
        # Three choices do not fit: none of them is queued, so two others fit.
        with busy(engine), pytest.raises(openai.RateLimitError):
            client.completions.create(model=MODEL, prompt="x", n=3, **ENDLESS)
        wait_until(lambda: is_idle(engine), "the refused choices are gone")
        with connect(narrow) as connection:
            with busy(engine):
                connection.sendall(request_for({**asked, "n": 2}))
                wait_until(lambda: engine.num_waiting == 2, "both choices wait")
                with pytest.raises(openai.RateLimitError) as caught:
                    client.completions.create(**asked)
            answer = read(connection)
    assert answer is not None
    assert answer.status == 200
    assert caught.value.response.headers["retry-after"] == "1"
    assert caught.value.code == "rate_limit_exceeded"
    assert "try again" in str(caught.value)


def test_a_client_that_leaves_a_stream_ends_its_request(narrow: Running) -> None:
    with narrow.client() as client:
        stream = client.completions.create(model=MODEL, prompt="x", stream=True, **ENDLESS)
        next(iter(stream))
        assert narrow.engine.num_running == 1
        stream.close()
    wait_until(lambda: is_idle(narrow.engine), "the request ends with its client")
    wait_until(lambda: counted(narrow, 499) >= 1, "it is counted as left")


def test_a_client_that_leaves_while_it_waits_ends_its_requests(narrow: Running) -> None:
    before = counted(narrow, 499)
    body = {"model": MODEL, "prompt": "x", "max_tokens": 7000, "ignore_eos": True, "n": 2}
    with connect(narrow) as connection:
        connection.sendall(request_for(body))
        engine = narrow.engine
        wait_until(lambda: engine.num_running == engine.num_waiting == 1, "one runs, one waits")
    wait_until(lambda: is_idle(narrow.engine), "both choices end with their client")
    wait_until(lambda: counted(narrow, 499) == before + 1, "it is counted as left")


def test_a_client_that_leaves_before_it_asked_is_no_trouble(served: Running) -> None:
    with connect(served) as connection:
        connection.sendall(head(COMPLETIONS, "Content-Length: 100") + b'{"model": "kv')
    with served.client() as client:
        assert client.models.list()


class Wordy:
    """The real engine, but every token is a long text."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokenizer = self

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    @property
    def max_token_bytes(self) -> int:
        return self._engine.tokenizer.max_token_bytes

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        return self._engine.tokenizer.encode(text, special_tokens=special_tokens)

    def detokenizer(self, before: object) -> Wordy:
        return self

    def push(self, token_id: int) -> str:
        return "x" * 500_000

    def flush(self) -> str:
        return ""


def test_a_client_that_does_not_read_does_not_hold_up_the_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier.serve.server.run.PATIENCE_S", 1)
    body = {"model": MODEL, "prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with running(Wordy(engine), ServerConfig(shutdown_grace_s=0)) as made:
        unread = connect(made)
        unread.sendall(request_for(body))
        unread.recv(1)
        wait_until(lambda: is_idle(engine), "all is generated, and more than fits on the way")
    unread.close()
    assert "given up" in caplog.text


def test_more_choices_than_allowed_are_refused(engine: Engine) -> None:
    with running(engine, ServerConfig(max_choices=3)) as made, made.client() as client:
        with pytest.raises(openai.BadRequestError, match="asks for 4 choices; ask for at most 3"):
            client.completions.create(model=MODEL, prompt=["a", "b"], n=2)
        assert client.completions.create(model=MODEL, prompt="a", n=3, max_tokens=1).choices


def counted(served: Running, status: int) -> float:
    """Return the number of completion requests that ended with ``status``."""
    return samples(served)["kvtier_server_requests_total", "completions", str(status)]


def request_for(asked: dict[str, Any]) -> bytes:
    return request(COMPLETIONS, json.dumps(asked).encode())
