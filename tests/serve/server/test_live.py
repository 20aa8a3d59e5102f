"""The live page of the server, and its data."""

from __future__ import annotations

import httpx
import pytest

from kvtier.observe.live.files import HEADERS, LIVE_PATH, TYPES
from kvtier.serve.engine import Engine
from kvtier.serve.server.config import ServerConfig

from .conftest import MODEL, Running, running
from .raw import samples

pytestmark = pytest.mark.engine


def test_the_page_and_its_files_are_there(served: Running) -> None:
    for path in ["/", *(f"/kvtier/page/{name}" for name in TYPES)]:
        answer = httpx.get(f"{served.url}{path}")
        assert answer.status_code == 200, path
        assert {name.lower(): value for name, value in HEADERS.items()}.items() <= {
            *answer.headers.items()
        }
    for path in ("/kvtier/page/nothing.js", "/kvtier/page/../live.py", "/kvtier/page/"):
        assert httpx.get(f"{served.url}{path}").status_code == 404


def test_the_picture_is_of_this_server(engine: Engine, prefix: str) -> None:
    with running(engine) as made, made.client() as client:
        client.completions.create(model=MODEL, prompt=prefix, max_tokens=1)
        seen = httpx.get(f"{made.url}{LIVE_PATH}").json()
        assert samples(made)["kvtier_server_requests_total", "live", "200"] == 1
    assert seen["engine"] == "kvtier"
    assert {tier["name"] for tier in seen["tiers"]} == {"device", "host"}
    assert seen["requests"]["running"] == 0
    assert seen["answers"][0]["question"] == "Is it worth its memory?"
    assert prefix[:20] not in str(seen)


def test_with_a_key_the_files_are_open_and_the_figures_are_not(engine: Engine) -> None:
    with running(engine, ServerConfig(api_key="k")) as made:
        assert httpx.get(f"{made.url}/").status_code == 200
        assert httpx.get(f"{made.url}/kvtier/page/page.js").status_code == 200
        assert httpx.get(f"{made.url}{LIVE_PATH}").status_code == 401
        assert httpx.get(f"{made.url}/kvtier/page/other").status_code == 401
        known = {"Authorization": "Bearer k"}
        assert httpx.get(f"{made.url}{LIVE_PATH}", headers=known).status_code == 200
