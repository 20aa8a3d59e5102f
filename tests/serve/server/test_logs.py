"""Log lines of the real program: one event each, and no content of requests."""

from __future__ import annotations

import json
import signal
from typing import Any

import httpx
import pytest

from tests.kit.cli import refused

from .conftest import MODEL
from .program import program
from .test_shutdown import end

pytestmark = pytest.mark.engine

TEXT, SALT, KEY, PARENT = "xyzzy plugh", "frotz salt", "gnusto-key", "rezrov"
SECRETS = ("xyzzy", "plugh", "frotz", "gnusto", "rezrov")


def _requests() -> list[dict[str, Any]]:
    asked = {"model": MODEL, "prompt": TEXT * 60, "max_tokens": 2, "cache_salt": SALT}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
    return [
        asked,
        {**asked, "stream": True},
        {**asked, "stop": [TEXT]},
        {**asked, "echo": True},
        chat,
        {**asked, "model": TEXT},
        {**asked, "temperature": TEXT},
        {**asked, TEXT: 1},
        {**asked, "prompt": [TEXT, 1]},
        {**asked, "prompt": TEXT * 10_000},
        {**chat, "messages": [{"role": TEXT, "content": TEXT}]},
    ]


def _ask_everything(client: httpx.Client) -> set[int]:
    headers = {"X-KVTier-Explain": "1", "traceparent": PARENT}
    wrong = {"Authorization": f"Bearer {KEY}-wrong"}
    codes = set()
    for asked in _requests():
        path = f"/v1/{'chat/' if 'messages' in asked else ''}completions?{PARENT}"
        codes.add(client.post(path, json=asked, headers=headers).status_code)
    codes.add(client.post("/v1/completions", json=_requests()[0], headers=wrong).status_code)
    bad = {"X-KVTier-Explain": TEXT}
    codes.add(client.post("/v1/completions", json=_requests()[0], headers=bad).status_code)
    json_kind = {"Content-Type": "application/json"}
    codes.add(client.post("/v1/completions", content=TEXT, headers=json_kind).status_code)
    codes.add(client.get(f"/{PARENT}").status_code)
    return codes


@pytest.mark.slow
@pytest.mark.nightly
def test_nothing_that_was_asked_is_logged() -> None:
    options = ["--log-level", "debug", "--host-capacity", "64MiB"]
    options += ["--events", "tcp://127.0.0.1:*"]
    with program(*options, KVTIER_API_KEY=KEY, KVTIER_LOG_FORMAT="json") as (process, url):
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            assert _ask_everything(client) == {200, 400, 401, 404}
        process.send_signal(signal.SIGTERM)
        logged = end(process)
    assert not [secret for secret in SECRETS if secret in logged]
    entries = [json.loads(line) for line in logged.splitlines()]
    assert all({"time", "level", "logger", "event"} <= entry.keys() for entry in entries)
    by_event = {entry["event"]: entry for entry in entries}
    assert {"serving", "shutting down", "stopped"} <= by_event.keys()
    assert by_event["serving"]["model"] == MODEL
    assert by_event["request"]["endpoint"] in ("completions", "other")
    assert by_event["prompt"]["explanation"]["prompt_tokens"] > 0


def test_a_format_that_there_is_not_is_told() -> None:
    said = refused("serve", "--port", "0", KVTIER_LOG_FORMAT="xml")
    assert "KVTIER_LOG_FORMAT='xml' in the environment: use text or json" in said
