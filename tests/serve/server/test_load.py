"""Many clients, full queues, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import httpx
import openai
import pytest

from kvtier.serve.engine import Engine, EngineConfig
from kvtier.serve.server import ServerConfig
from tests.kit.waiting import wait_until

from .conftest import MODEL, Running, running

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
    may_go_on, is_held = Event(), Event()

    def hold() -> None:
        is_held.set()
        may_go_on.wait(60)

    holder = Thread(target=lambda: engine.call(hold))
    holder.start()
    assert is_held.wait(30)
    asked: Any = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    with narrow.client() as client:
        # Three choices do not fit: none of them is queued, so two others fit.
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model=MODEL, prompt="x", n=3, **ENDLESS)
        may_go_on.set()
        holder.join()
        wait_until(lambda: is_idle(engine), "the refused choices are gone")

        may_go_on.clear()
        is_held.clear()
        holder = Thread(target=lambda: engine.call(hold))
        holder.start()
        assert is_held.wait(30)
        answers: list[httpx.Response] = []
        waiting = Thread(
            target=lambda: answers.append(
                httpx.post(f"{narrow.url}/v1/completions", json={**asked, "n": 2}, timeout=60)
            )
        )
        waiting.start()
        wait_until(lambda: engine.num_waiting == 2, "both choices wait")
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**asked)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "rate_limit_exceeded"
        assert "try again" in str(caught.value)
        may_go_on.set()
        holder.join()
        waiting.join(60)
    assert [answer.status_code for answer in answers] == [200]


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
    with post_raw(narrow, json.dumps(body).encode()):
        engine = narrow.engine
        wait_until(lambda: engine.num_running == engine.num_waiting == 1, "one runs, one waits")
    wait_until(lambda: is_idle(narrow.engine), "both choices end with their client")
    wait_until(lambda: counted(narrow, 499) == before + 1, "it is counted as left")


def test_a_client_that_leaves_before_it_asked_is_no_trouble(served: Running) -> None:
    with post_raw(served, b'{"model": "kv', length=100):
        pass
    with served.client() as client:
        assert client.models.list()


def test_tokenizing_does_not_hold_up_others(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, is_in = Event(), Event()
    encode = served.engine.tokenizer.encode

    def slowly(text: str, special_tokens: bool = False) -> list[int]:
        is_in.set()
        assert may_go_on.wait(60)
        return encode(text, special_tokens=special_tokens)

    monkeypatch.setattr(served.engine.tokenizer, "encode", slowly)
    answers: list[httpx.Response] = []
    asked: Any = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    thread = Thread(
        target=lambda: answers.append(
            httpx.post(f"{served.url}/v1/completions", json=asked, timeout=60)
        )
    )
    thread.start()
    assert is_in.wait(30)
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert not answers
    may_go_on.set()
    thread.join(60)
    assert [answer.status_code for answer in answers] == [200]


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
        unread = post_raw(made, json.dumps(body).encode())
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
    text = httpx.get(f"{served.url}/metrics").text
    name = f'kvtier_server_requests_total{{endpoint="completions",status="{status}"}} '
    return sum(
        float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)
    )


def post_raw(served: Running, body: bytes, length: int | None = None) -> socket.socket:
    """Send a request without waiting for the answer. Return the connection."""
    host, port = served.url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)), timeout=60)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length or len(body)}\r\n\r\n"
    )
    made.sendall(head.encode() + body)
    return made
