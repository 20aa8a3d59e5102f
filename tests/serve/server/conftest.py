"""A real engine with the built-in model, and real servers on loopback in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import cast

import openai
import pytest
from openai.types import CompletionUsage

from kvtier.core.config import CacheConfig
from kvtier.serve.engine import Engine, EngineConfig
from kvtier.serve.server.config import ServerConfig
from kvtier.serve.server.listener import bind
from kvtier.serve.server.run import HttpServer

MODEL = "kvtier-tiny"


@dataclass(frozen=True)
class Running:
    """A server in a thread of its own."""

    url: str
    server: HttpServer
    engine: Engine

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60)


@contextmanager
def running(engine: object, config: ServerConfig | None = None) -> Iterator[Running]:
    """Serve ``engine``, or a stand-in for one, until the block ends."""
    real = cast(Engine, engine)
    server = HttpServer(real, config or ServerConfig(), bind("127.0.0.1", 0))
    is_ready = Event()
    thread = Thread(target=server.run, args=(lambda url: is_ready.set(),), name="test-server")
    thread.start()
    assert is_ready.wait(30), "the server does not start"
    try:
        yield Running(server.url, server, real)
    finally:
        server.stop()
        server.stop()  # do not wait for requests that tests leave behind
        thread.join(30)
        assert not thread.is_alive(), "the server does not end"


@contextmanager
def busy(engine: Engine) -> Iterator[None]:
    """Hold the engine's thread between two steps."""
    may_go_on, is_held = Event(), Event()

    def hold() -> None:
        is_held.set()
        assert may_go_on.wait(60)

    held = engine.call_later(hold)
    assert is_held.wait(30)
    try:
        yield
    finally:
        may_go_on.set()
        held.result(60)


def cached(usage: CompletionUsage | None) -> int:
    """Return the number of cached tokens of an answer."""
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    config = EngineConfig(
        model=MODEL,
        device_capacity="96MiB",
        threads=1,
        cache=CacheConfig(host_capacity="1x", strict=True),
    )
    with Engine(config) as made:
        yield made


@pytest.fixture(scope="session")
def served(engine: Engine) -> Iterator[Running]:
    """The server that most tests share."""
    with running(engine) as made:
        yield made


@pytest.fixture
def client(served: Running) -> Iterator[openai.OpenAI]:
    with served.client() as made:
        yield made


@pytest.fixture(scope="session")
def prefix() -> str:
    """Return some hundred tokens of text that prompts can share."""
    lines = (f"def method_{at}(self, value):\n    return value + {at}\n\n" for at in range(40))
    return "".join(lines)
