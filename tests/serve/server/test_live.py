"""The live page of the server, and its data."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from kvtier.observe.live.files import HEADERS, HOUR_QUERY, LIVE_PATH, TYPES
from kvtier.observe.live.history import History
from kvtier.observe.live.reading import Reading
from kvtier.serve.engine import Engine
from kvtier.serve.server.config import ServerConfig
from tests.kit.waiting import wait_until

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


def test_the_server_keeps_the_charts_of_before_a_page_opens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("control.page.EVERY_S", "observe.live.charts.EVERY_S"):
        monkeypatch.setattr(f"kvtier.{name}", 0.01)
    monkeypatch.setattr("kvtier.control.page.LEAST_PAUSE_S", 0.0)
    looks: list[Reading] = []
    look = History.look

    def note(history: History, reading: Reading) -> dict[str, Any]:
        looks.append(reading)
        return look(history, reading)

    monkeypatch.setattr(History, "look", note)
    with running(engine) as made:
        wait_until(lambda: len(looks) >= 3)
        monkeypatch.setattr("kvtier.control.page.EVERY_S", 3600.0)
        hour = httpx.get(f"{made.url}{LIVE_PATH}?{HOUR_QUERY}").json()["hour"]
        assert "hour" not in httpx.get(f"{made.url}{LIVE_PATH}").json()
    assert len(hour["ages_s"]) >= 4
    assert hour["ages_s"] == sorted(hour["ages_s"], reverse=True)
    assert len(hour["charts"]["saved"]["saved"]) == len(hour["ages_s"])


def test_with_a_key_the_files_are_open_and_the_figures_are_not(engine: Engine) -> None:
    with running(engine, ServerConfig(api_key="k")) as made:
        assert httpx.get(f"{made.url}/").status_code == 200
        assert httpx.get(f"{made.url}/kvtier/page/page.js").status_code == 200
        assert httpx.get(f"{made.url}{LIVE_PATH}").status_code == 401
        assert httpx.get(f"{made.url}/kvtier/page/other").status_code == 401
        known = {"Authorization": "Bearer k"}
        assert httpx.get(f"{made.url}{LIVE_PATH}", headers=known).status_code == 200
