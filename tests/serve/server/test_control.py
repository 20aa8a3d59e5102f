"""Control of a server's own cache: lookup, prefetch, pin, deletion from all tiers, and access."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.core.config import CacheConfig
from kvtier.core.types import DEVICE, HOST
from kvtier.serve.engine import Engine, EngineConfig
from kvtier.serve.server.config import ServerConfig
from kvtier.tools.cli.api_keys import CONTROL_KEY_VARIABLE
from tests.kit.cli import kvtier
from tests.kit.waiting import wait_until

from .conftest import MODEL, Running, cached, running
from .raw import samples

KEY = "the-key-of-the-control"
TEXT, OTHER = "one " * 100, "two " * 100


@contextmanager
def started(folder: Path) -> Iterator[Running]:
    config = EngineConfig(
        model=MODEL,
        block_size=16,
        chunk_tokens=16,
        device_capacity="8MiB",
        threads=1,
        cache=CacheConfig(
            host_capacity="4MiB", disk_path=str(folder), disk_capacity="64MiB", strict=True
        ),
    )
    server = ServerConfig(control_key=KEY)
    with Engine(config) as engine, running(engine, server) as made:
        yield made


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Running]:
    with started(tmp_path) as made:
        yield made


def post(served: Running, route: str, key: str = KEY, **body: Any) -> Any:
    """Return the answer, or the status of a refusal."""
    headers = {"Authorization": f"Bearer {key}"}
    method, content = ("GET", None) if route == "/status" else ("POST", body)
    url = f"{served.url}{route}"
    answer = httpx.request(method, url, json=content, headers=headers, timeout=60)
    return answer.json() if answer.status_code == 200 else answer.status_code


def num_cached(served: Running, text: str, salt: str = "") -> int:
    """Run a prompt. Return how many of its tokens were cached."""
    with served.client() as client:
        usage = client.completions.create(
            model=MODEL, prompt=text, max_tokens=1, extra_body={"cache_salt": salt}
        ).usage
    assert served.engine.drain()
    return cached(usage)


def test_a_deleted_prompt_is_gone_also_after_a_restart(tmp_path: Path) -> None:
    with started(tmp_path) as served:
        for text in (TEXT, OTHER):
            num_cached(served, text)
            assert num_cached(served, text) > 0
        found = post(served, "/lookup", prompt=TEXT)
        assert found["blocks"] == found["in_memory"] == found["found"] > 0
        done = post(served, "/delete", prompt=TEXT)
        assert (done["is_complete"], done["problems"]) == (True, [])
        assert done["blocks"] == found["blocks"]
        assert post(served, "/lookup", prompt=TEXT)["found"] == 0
    with started(tmp_path) as served:
        assert post(served, "/lookup", prompt=OTHER)["found"] == found["blocks"]
        assert post(served, "/lookup", prompt=TEXT)["found"] == 0
        assert num_cached(served, TEXT) == 0
        assert num_cached(served, OTHER) > 0


def test_a_tenant_is_deleted_with_what_only_the_disk_knows(tmp_path: Path) -> None:
    with started(tmp_path) as served:
        num_cached(served, TEXT, "a")
        num_cached(served, TEXT, "b")
        rooms = {each["tenant"]: each["used_bytes"] for each in post(served, "/status")["rooms"]}
        assert rooms.keys() == {"a", "b"}
        assert rooms["a"] == rooms["b"]
        assert rooms["a"]["disk"] > 0
    with started(tmp_path) as served:
        assert num_cached(served, TEXT, "b") > 0
        done = post(served, "/delete", tenant="a")
        assert (done["is_complete"], done["rooms"]) == (True, ["a"])
    with started(tmp_path) as served:
        assert post(served, "/lookup", prompt=TEXT, tenant="a")["found"] == 0
        assert post(served, "/lookup", prompt=TEXT, tenant="b")["found"] > 0
        assert post(served, "/clear")["is_complete"]
    with started(tmp_path) as served:
        assert num_cached(served, TEXT, "b") == 0


@pytest.mark.parametrize("body", [{"prompt": TEXT, "tenant": "a"}, {"tenant": "a"}])
def test_kv_in_quarantine_is_deleted_with_its_tenants(
    served: Running, body: dict[str, str]
) -> None:
    """After an audit found a difference, a tenant's namespace has another name."""
    engine = served.engine
    num_cached(served, TEXT, "a")
    before = engine.namespace_of("a")
    engine.call(lambda: engine._quarantine.add(before))
    assert num_cached(served, TEXT, "a") == 0
    assert num_cached(served, TEXT, "a") > 0
    assert {each["tenant"] for each in post(served, "/status")["rooms"]} == {"a"}
    assert post(served, "/delete", **body)["is_complete"]
    used = engine.call(engine.cache.used_by_namespace)
    assert not any(used.get(name, {}).get(HOST) for name in engine.namespaces_of("a"))
    assert num_cached(served, TEXT, "a") == 0


def test_a_prompt_is_prefetched_and_pinned(served: Running) -> None:
    num_cached(served, TEXT)
    post(served, "/clear", memory_only=True)
    served.engine.clear_tier(DEVICE)
    found = post(served, "/lookup", prompt=TEXT)
    assert (found["in_memory"], found["found"]) == (0, found["blocks"])
    assert post(served, "/prefetch", prompt=TEXT)["in_memory"] == found["blocks"]
    pinned = post(served, "/pin", prompt=TEXT, seconds=600)
    assert (pinned["number"], pinned["pinned"]) == (1, found["blocks"])
    post(served, "/clear", memory_only=True)
    assert post(served, "/lookup", prompt=TEXT)["in_memory"] == found["blocks"]
    assert post(served, "/status")["pinned_blocks"] == found["blocks"]
    post(served, "/unpin", number=1)
    assert post(served, "/unpin", number=1) == 404
    post(served, "/clear", memory_only=True)
    assert post(served, "/lookup", prompt=TEXT)["in_memory"] == 0


def hint(served: Running, **body: Any) -> list[tuple[str, str, int]]:
    """Give a hint while no request runs. Return action, outcome and blocks of each result."""
    found = post(served, "/hint", **body)
    return [(each["action"], each["outcome"], each["blocks"]) for each in found["hints"]]


def test_a_prompt_is_prefetched_and_demoted_while_no_request_runs(served: Running) -> None:
    num_cached(served, TEXT, "a")
    served.engine.clear_tier(DEVICE)
    num = post(served, "/lookup", prompt=TEXT, tenant="a")["blocks"]
    named: dict[str, Any] = {"prompt": TEXT, "tenant": "a"}
    assert hint(served, **named, kvtier={"demote": {}}) == [("demote", "done", num)]
    assert post(served, "/lookup", **named)["places"] == ["storage"] * num
    assert hint(served, **named, kvtier={"prefetch": {"within_s": 0.1}}) == [
        ("prefetch", "begun", num)
    ]
    wait_until(lambda: post(served, "/lookup", **named)["in_memory"] == num)
    assert hint(served, prompt=TEXT, kvtier={"prefetch": {"within_s": 0.1}}) == [
        ("prefetch", "absent", 0)
    ], "of another tenant"
    assert num_cached(served, TEXT, "a") > 0
    counted = samples(served)
    assert counted["kvtier_hints_total", "prefetch", "used"] == 1


def test_a_chat_is_named_by_its_messages(served: Running) -> None:
    messages = [{"role": "user", "content": TEXT}]
    with served.client() as client:
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)  # type: ignore[arg-type]
    assert served.engine.drain()
    found = post(served, "/lookup", chat={"messages": messages})
    assert found["in_memory"] == found["blocks"] > 0
    release = {"retain": [{"priority": 90}], "ended": True}
    assert hint(served, chat={"messages": messages}, kvtier=release) == [
        ("pin", "done", found["blocks"]),
        ("release", "done", found["blocks"]),
    ]
    assert post(served, "/lookup", chat={"messages": []}) == 400


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": TEXT},
        {"prompt": TEXT, "kvtier": {"prefetch": {}}},
        {"prompt": TEXT, "chat": {}, "kvtier": {}},
        {"kvtier": {"ended": True}},
        {"prompt": TEXT, "kvtier": 5},
    ],
)
def test_a_malformed_hint_is_refused(served: Running, body: dict[str, Any]) -> None:
    assert post(served, "/hint", **body) == 400
    assert post(served, "/hint", "another", **body) == 401


@pytest.mark.parametrize("route", ["/hint", "/lookup", "/delete"])
@pytest.mark.parametrize("field", ["tenant", "prompt"])
def test_half_of_a_surrogate_pair_is_refused(served: Running, route: str, field: str) -> None:
    body: dict[str, object] = {"prompt": TEXT, field: "\ud800"}
    if route == "/hint":
        body["kvtier"] = {}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = httpx.post(
        f"{served.url}{route}", content=json.dumps(body), headers=headers, timeout=60
    )
    assert answer.status_code == 400
    assert "half of a surrogate pair" in answer.json()["error"]


@pytest.mark.parametrize(
    ("route", "body", "named"),
    [
        ("/delete", {"promt": TEXT, "tenant": "team-a"}, "promt"),
        ("/lookup", {"prompt": TEXT, "tenat": "team-a"}, "tenat"),
        ("/hint", {"prompt": TEXT}, "kvtier"),
        ("/pin", {"prompt": TEXT, "seconds": TEXT}, "seconds"),
        ("/lookup", {"prompt": TEXT, "\ud800": 1}, "the body"),
        ("/lookup", [TEXT], "application/json"),
    ],
)
def test_a_body_that_does_not_fit_is_one_sentence_without_its_prompt(
    served: Running, route: str, body: object, named: str
) -> None:
    """A deletion with a misspelt prompt would otherwise be that of the whole tenant."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = httpx.post(
        f"{served.url}{route}", content=json.dumps(body), headers=headers, timeout=60
    )
    assert answer.status_code == 400
    assert named in answer.json()["error"]
    assert TEXT not in answer.text


def test_only_the_control_key_opens_it(served: Running) -> None:
    assert post(served, "/lookup", "another", prompt=TEXT) == 401
    assert post(served, "/status", "another") == 401
    assert post(served, "/lookup", prompt=TEXT)["found"] == 0
    for body in ({}, {"keys": ["ff"]}, {"prompt": TEXT, "room": "x"}, {"prompt": "short"}):
        assert post(served, "/lookup", **body) == 400


def test_without_a_control_key_there_are_no_such_routes(engine: Engine) -> None:
    with running(engine) as served:
        assert post(served, "/delete", prompt=TEXT) == 404


def test_the_commands_of_a_node_control_a_server(served: Running) -> None:
    def command(*words: str, status: int = 0) -> str:
        done = kvtier("node", *words, "--socket", served.url, **{CONTROL_KEY_VARIABLE: KEY})
        assert done.exit_code == status, done.output
        return done.output

    num_cached(served, TEXT, "a")
    assert "room a: of 6 blocks the first 6 are" in command(
        "lookup", "--prompt", TEXT, "--tenant", "a"
    )
    assert "6 of 6 blocks are pinned" in command("pin", "--prompt", TEXT, "--tenant", "a")
    assert "room a: blocks of" in command("status")
    assert "deleted 6 blocks of a" in command("delete", "--prompt", TEXT, "--tenant", "a")
    assert "the first 0 are" in command("lookup", "--prompt", TEXT, "--tenant", "a")
    assert "give prompt" in command("lookup", "ff", status=2)
