"""The router of examples/router, before real servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from examples.router.router import Router, Server, cheapest_first
from kvtier.core.config import CacheConfig
from kvtier.serve.engine import Engine, EngineConfig
from kvtier.serve.server.config import ServerConfig
from tests.kit.servers import free_port
from tests.kit.waiting import wait_until
from tests.serve.server.conftest import MODEL, Running, busy, running

pytestmark = pytest.mark.engine
KEY = "secret"


@contextmanager
def routing(urls: list[str], deadline_s: float = 5.0) -> Iterator[tuple[Router, str]]:
    """Run the router. Yield it and its URL."""
    router = Router(urls, deadline_s)
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(router.app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, "the router listens")
        yield router, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Running]]:
    config = EngineConfig(
        MODEL, device_capacity="32MiB", threads=1, cache=CacheConfig(host_capacity="1x")
    )
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(config)) for _ in range(2)]
        yield [
            stack.enter_context(running(engine, ServerConfig(api_key=(KEY,)))) for engine in engines
        ]


def post(url: str, path: str = "completions", key: str = KEY, **body: Any) -> httpx.Response:
    asked = {"model": MODEL, "max_tokens": 1, "temperature": 0, **body}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/{path}", json=asked, headers=headers, timeout=60)


def complete(url: str, prompt: str, salt: str = "") -> int:
    """Return how many tokens of a prompt were cached."""
    answer = post(url, prompt=prompt, cache_salt=salt)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_it_has_at_most_150_lines() -> None:
    path = Path(__file__).parents[2] / "examples" / "router" / "router.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150


def test_a_prompt_goes_to_the_server_that_has_it(servers: list[Running]) -> None:
    prompts = [f"Prompt {at} of a client. " * 200 for at in range(2)]
    for at, server in enumerate(servers):
        assert complete(server.url, prompts[at]) == 0
        assert server.engine.drain()
        if at:
            server.engine.clear_tier("device")
    with routing([server.url for server in servers]) as (router, url):
        for _ in range(3):
            assert complete(url, prompts[0]) > 0
        assert [server.num_sent for server in router.servers] == [3, 0]
        assert complete(url, prompts[1]) > 0, "in host memory"
        assert [server.num_sent for server in router.servers] == [3, 1]
        wait_until(lambda: not any(server.num_running for server in router.servers))


def test_answers_streams_and_errors_are_passed_on(servers: list[Running]) -> None:
    chat: Any = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    chat["path"] = "chat/completions"
    headers = {"Authorization": f"Bearer {KEY}"}
    with routing([server.url for server in servers]) as (router, url):
        whole = post(servers[0].url, **chat).json()["choices"][0]["message"]["content"]
        stream = post(url, **chat, stream=True)
        assert stream.headers["content-type"].startswith("text/event-stream")
        parts = (json.loads(line[6:]) for line in stream.text.splitlines() if "{" in line)
        text = [part["choices"][0]["delta"].get("content") or "" for part in parts]
        assert len(text) > 2
        assert "".join(text) == whole
        models = httpx.get(f"{url}/v1/models", headers=headers).json()
        assert [model["id"] for model in models["data"]] == [MODEL]
        assert post(url, prompt="x", key="wrong").status_code == 401
        refused = post(url, prompt="x", temperature=9)
        assert refused.status_code == 400
        assert "temperature" in refused.json()["error"]["message"]
        wait_until(lambda: not any(server.num_running for server in router.servers))


def test_a_client_that_leaves_ends_its_answer(servers: list[Running]) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with routing([servers[0].url]) as (router, url):
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
            lines = answer.iter_lines()  # the connection is closed when this iterator is collected
            next(lines)
            assert router.servers[0].num_running == 1
        wait_until(lambda: not router.servers[0].num_running, "the router has noticed")
        wait_until(lambda: not servers[0].engine.num_running, "the server has noticed")


def test_servers_that_do_not_answer_are_left_out(servers: list[Running]) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with routing([dead, servers[1].url]) as (router, url):
        for _ in range(2):
            complete(url, "one of them is dead")
        assert [server.num_sent for server in router.servers] == [0, 2]
    with routing([dead]) as (_, url):
        answer = post(url, prompt="all are dead")
        assert (answer.status_code, answer.text) == (503, "No server can be reached.")
    urls = [server.url for server in servers]
    with busy(servers[0].engine), routing(urls, deadline_s=0.5) as (router, url):
        complete(url, "one of them hangs", salt="hangs")
        assert [server.num_sent for server in router.servers] == [0, 1]


def test_equal_costs_go_to_the_least_loaded() -> None:
    a, b, c = (Server("", *load) for load in ((2, 0), (1, 9), (1, 8)))

    def order(*costs: float) -> list[Server]:
        return cheapest_first([a, b, c], costs)

    assert order(1.0, 1.1, 1.2) == [c, b, a]
    assert order(1.0, 1.1, 2.0) == [b, a, c]
    assert order(0.0, 0.0, 0.1) == [b, a, c]
    assert order(inf, inf, 1.0) == [c, b, a]
    assert order(inf, inf, inf) == [c, b, a]
