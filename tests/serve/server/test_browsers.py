"""Browsers and load balancers: pages of other origins, HEAD, OPTIONS, compressed bodies."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import httpx
import pytest

from kvtier.core.errors import ConfigError
from kvtier.serve.engine import Engine
from kvtier.serve.server.config import ServerConfig

from .conftest import MODEL, Running, running

pytestmark = pytest.mark.engine

PAGE, OTHER, KEY = "https://chat.example", "https://evil.example", "frobozz"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}
CHAT = {"model": MODEL, "prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def made(engine: Engine) -> Iterator[Running]:
    config = ServerConfig(api_key=KEY, cors_origin=(PAGE, "http://localhost:3000"))
    with running(engine, config) as made:
        yield made


def ask(made: Running, origin: str, key: str = KEY) -> httpx.Response:
    headers = {"Origin": origin, "Authorization": f"Bearer {key}"}
    return httpx.post(f"{made.url}/v1/completions", json=CHAT, headers=headers, timeout=60)


def test_a_page_of_a_listed_origin_may_ask_first_without_a_key(made: Running) -> None:
    url = f"{made.url}/v1/completions"
    answer = httpx.options(url, headers={"Origin": PAGE, **PREFLIGHT})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-credentials" not in answer.headers
    refused = httpx.options(url, headers={"Origin": OTHER, **PREFLIGHT})
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


def test_only_pages_of_listed_origins_may_read_answers_and_errors(made: Running) -> None:
    for key, status in ((KEY, 200), ("wrong", 401)):
        answer = ask(made, PAGE, key)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert answer.headers["vary"] == "Origin"
        assert "access-control-allow-origin" not in ask(made, OTHER, key).headers


def test_without_the_setting_no_page_may_read_anything(engine: Engine) -> None:
    with running(engine) as made:
        assert "access-control-allow-origin" not in ask(made, PAGE).headers


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/", "https://", "", "https://CHAT.example"]
)
def test_what_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origin: .* is no origin; write it as a browser"):
        ServerConfig(cors_origin=(origin,))


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/"])
def test_head_is_get_without_a_body(made: Running, path: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=made.url, headers=headers) as client:
        whole, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b"") == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
        assert client.get("/health").status_code == 200, "the connection goes on"


def test_options_lists_what_a_path_takes(made: Running) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.options(f"{made.url}/v1/completions", headers=headers)
    assert (answer.status_code, answer.headers["allow"]) == (204, "POST, OPTIONS")
    assert httpx.options(f"{made.url}/v1/completions").status_code == 401


@pytest.mark.parametrize("encoding", ["gzip", "br", "Zstd"])
def test_a_compressed_body_is_named_as_the_reason(made: Running, encoding: str) -> None:
    body = gzip.compress(json.dumps(CHAT).encode())
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with httpx.Client(base_url=made.url, headers=headers, timeout=60) as client:
        answer = client.post(
            "/v1/completions", content=body, headers={"Content-Encoding": encoding}
        )
        assert answer.status_code == 415
        message = answer.json()["error"]["message"]
        assert f'Content-Encoding: "{encoding.lower()}"' in message
        assert "send it as it is" in message
        plain = {"Content-Encoding": "identity"}
        assert client.post("/v1/completions", json=CHAT, headers=plain).status_code == 200
