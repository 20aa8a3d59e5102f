"""SGLang's router in front of two of kvtier's servers, with the requests that it rewrites."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from kvtier.core.config import CacheConfig
from kvtier.serve.engine import Engine, EngineConfig
from tests.kit.dynamo import PYTHON, needs_routers
from tests.kit.servers import free_ports
from tests.kit.waiting import wait_until
from tests.serve.server.conftest import MODEL, Running, running

pytestmark = [pytest.mark.engine, needs_routers]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Running]]:
    config = EngineConfig(
        MODEL, device_capacity="32MiB", threads=1, cache=CacheConfig(host_capacity="1x")
    )
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(config)) for _ in range(2)]
        yield [stack.enter_context(running(engine)) for engine in engines]


@pytest.fixture(scope="module")
def router(
    servers: list[Running], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    port, metrics = free_ports(2)
    log = tmp_path_factory.mktemp("router") / "log"
    with log.open("w") as written:
        process = subprocess.Popen(
            [
                *(PYTHON, "-m", "sglang_router.launch_router", "--policy", "cache_aware"),
                *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)),
                *("--worker-urls", *(server.url for server in servers)),
            ],
            stdout=written,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
        )
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(f"{url}/readiness").is_success
        except httpx.HTTPError:
            return False

    wait_until(is_ready, "the router knows both servers")
    yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    process.kill()
    process.wait()


def complete(client: openai.OpenAI, prompt: str, **options: Any) -> tuple[str, int]:
    """Return the answer to a prompt, and how many of its tokens were cached."""
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=4, temperature=0, **options
    )
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return answer.choices[0].text, usage.prompt_tokens_details.cached_tokens or 0


def test_answers_through_the_router_are_those_of_the_servers(
    router: openai.OpenAI, servers: list[Running]
) -> None:
    direct, prompt = servers[0].client(), "Once upon a time there was a cache. " * 20
    assert complete(router, prompt)[0] == complete(direct, prompt)[0]
    asked: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "temperature": 0,
    }
    through, own = (client.chat.completions.create(**asked) for client in (router, direct))
    assert through.choices[0].message.content == own.choices[0].message.content
    parts = [
        part.choices[0].delta.content
        for part in router.chat.completions.create(**asked, stream=True)
    ]
    assert "".join(part or "" for part in parts) == own.choices[0].message.content


def test_a_prompt_returns_to_the_server_that_has_it(router: openai.OpenAI) -> None:
    prompt = "Every prompt has a server that knows it. " * 20
    text, _ = complete(router, prompt)
    for _ in range(3):
        assert complete(router, prompt) == (text, 128)
