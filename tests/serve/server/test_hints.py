"""Hints of clients reach the engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kvtier.core.hints import Hint, Retain
from kvtier.serve.engine import Engine

from .conftest import MODEL, running
from .raw import samples

pytestmark = pytest.mark.engine

RANGE = {"first_token": 0, "last_token": 100, "priority": 90}


def envelope(kind: str) -> dict[str, object]:
    """Return the hints of an orchestrator."""
    action = {"action_id": "1", "action_version": "1.0", "action_type": kind}
    actions = [{**action, "payload": {"back_in_s": 600}}]
    return {"protocol_version": "0.1", "message_id": "1", "actions": actions}


@pytest.mark.parametrize(
    "asked", [{"prompt": "hello"}, {"messages": [{"role": "user", "content": "hello"}]}]
)
def test_an_orchestrators_hint_counts_unless_the_client_has_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, asked: dict[str, object]
) -> None:
    heard: list[object] = []
    submit = engine.submit

    def noted(*arguments: Any, **named: Any) -> object:
        heard.append(named["hint"])
        return submit(*arguments, **named)

    monkeypatch.setattr(engine, "submit", noted)
    path = "completions" if "prompt" in asked else "chat/completions"
    with running(engine) as made:
        for given in (
            {},
            {"kvtier": {"retain": [RANGE], "ended": True}},
            {"kv_hints": envelope("kvtier.hint")},
            {"kv_hints": envelope("kvtier.hint"), "kvtier": {"ended": True}},
            {"kv_hints": envelope("another.hint")},
        ):
            body = {"model": MODEL, "max_tokens": 1, **asked, **given}
            answer = httpx.post(f"{made.url}/v1/{path}", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
        counted = samples(made)
    assert heard == [
        None,
        Hint((Retain(90, 0, 100),), ended=True),
        Hint(back_in_s=600),
        Hint(ended=True),
        None,
    ]
    assert counted["kvtier_server_hint_actions_total", "kvtier.hint"] == 2
    assert counted["kvtier_server_hint_actions_total", "unknown"] == 1


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_says_what_came_of_its_hints(engine: Engine, is_streamed: bool) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 1,
        "prompt": ["one " * 300, "two " * 300],
        "kvtier": {"retain": [{"priority": 90}], "prefetch": {"within_s": 5}},
    }
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    with running(engine) as made:
        answer = httpx.post(f"{made.url}/v1/completions", json=body, timeout=60)
    last = answer.text.split("data: ")[-2] if is_streamed else answer.text
    hints = json.loads(last)["kvtier"]["hints"]
    assert [[(each["action"], each["outcome"]) for each in of_prompt] for of_prompt in hints] == [
        [("pin", "done"), ("prefetch", "no_storage")]
    ] * 2
    assert hints[0][0]["blocks"] > 0
