"""``kvtier bench url`` against a real ``kvtier serve``, and against misbehaving servers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Barrier, Event, Lock
from typing import Any
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner, Result

from kvtier.observe.live.client import MAX_BYTES, MAX_LINE_BYTES
from kvtier.tools.bench_url.exchange import Exchange
from kvtier.tools.bench_url.result import TurnFigures
from kvtier.tools.cli import app
from tests.observe.live.test_scrape import serving
from tests.serve.server.program import program

KEY = "frobozz-key"
EVIL = "[bold]\x1b]0;title\x07"
SMALL = ("--shared-tokens", "40", "--turn-tokens", "20", "--max-tokens", "4")


def kvtier(url: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["bench", "url", url, *SMALL, *options])


def found(url: str, *options: str) -> dict[str, Any]:
    told = kvtier(url, *options, "--json", "-")
    assert told.exit_code == 0, told.output
    result: dict[str, Any] = json.loads(told.stdout)
    return result


# -- a real server --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.engine
def test_a_real_server_says_what_it_had_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    with program(KVTIER_API_KEY=KEY) as (_, url):
        refused = kvtier(url)
        assert (refused.exit_code, "answers 401" in refused.output) == (2, True)
        options = ("--requests", "4", "--turns", "3", "--concurrency", "2", "--turn-tokens", "200")
        for way in ((), ("--chat",)):
            monkeypatch.setenv("KVTIER_API_KEY", KEY)
            result = found(f"{url}/v1", *options, *way)
            every, first, later = (result[name] for name in ("all", "first_turns", "later_turns"))
            assert (every["requests"], first["requests"], later["requests"]) == (4, 2, 2)
            assert (result["errors"], result["not_sent"]) == ([], 0)
            assert every["prompt_tokens"] == first["prompt_tokens"] + later["prompt_tokens"]
            # Whole chunks of 128 tokens are reused: at least one in a second turn.
            assert later["cached_tokens"] >= 2 * 128
            assert 0 < every["completion_tokens"] <= 4 * 4
            assert 0 < every["ttft"]["median_ms"] <= every["end_to_end"]["median_ms"]
            assert every["ttft"]["p95_ms"] is None, "too few requests"
        request = urlopen(f"{url}/health")
        assert json.load(request)["model"] == result["model"]


# -- scripted servers -----------------------------------------------------------------------------


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def answer(text: str, body: dict[str, Any], cached: int | None = None) -> bytes:
    """Return a whole stream in the format of either endpoint. A token has four characters."""
    said = "".join(each["content"] for each in body.get("messages", ())) or body["prompt"]
    form = {"delta": {"content": text}} if "messages" in body else {"text": text}
    details = None if cached is None else {"cached_tokens": cached}
    usage = {
        "prompt_tokens": len(said) // 4,
        "completion_tokens": 2,
        "prompt_tokens_details": details,
    }
    return b": a comment\n\n" + b"".join(
        [
            event({"choices": [{**form, "finish_reason": None}], "usage": None}),
            event({"choices": [{**form, "text": "", "delta": {}, "finish_reason": "length"}]}),
            event({"choices": [], "usage": usage}),
            b"data: [DONE]\n\n",
        ]
    )


class Script(BaseHTTPRequestHandler):
    """A handler that answers the first request correctly, and all others by ``server.behave``."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.whole(json.dumps({"data": [{"id": f"a model {EVIL}"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        with server.lock:
            server.bodies.append(body)
            is_first = len(server.bodies) == 1
        with suppress(OSError):  # the client has disconnected
            if is_first:
                self.chunks(answer("ok", body))
            else:
                server.behave(self, body)

    def whole(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def chunks(self, *pieces: bytes, is_ended: bool = True) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        if is_ended:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        pass


Behave = Callable[[Script, dict[str, Any]], None]


class Scripted:
    """A server whose behaviour a test sets. bodies: all received requests."""

    def __init__(self, http: ThreadingHTTPServer, url: str) -> None:
        self.url = url
        self.bodies: list[dict[str, Any]] = []
        self.http = http
        vars(http).update(bodies=self.bodies, lock=Lock())

    def behave(self, how: Behave) -> None:
        vars(self.http)["behave"] = how

    def prompts(self) -> list[str]:
        """Return the received prompts, without the first one."""
        return [body["prompt"] for body in self.bodies[1:]]


@pytest.fixture
def server() -> Iterator[Scripted]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    with serving(http) as url:
        yield Scripted(http, url)


def slowly(script: Script, body: dict[str, Any]) -> None:
    script.send_response(200)
    script.end_headers()
    for each in answer("x" * 400, body):
        script.wfile.write(bytes([each]))
        Event().wait(0.05)


HALF = event({"choices": [{"text": "half"}]})
NO_EVENT = "an event that is none of the API's"
LIES: dict[str, tuple[Behave, str]] = {
    "cut": (
        lambda script, _: script.chunks(HALF, is_ended=False),
        "the connection ended within the answer",
    ),
    "no mark": (lambda script, _: script.chunks(HALF), "the answer ended before its end mark"),
    "an error": (
        lambda script, _: script.chunks(HALF, event({"error": {"message": EVIL}})),
        "an error within the answer",
    ),
    "refused": (
        lambda script, _: script.whole(event({"error": {"message": EVIL}})[6:], 429),
        "status 429",
    ),
    "moved": (lambda script, _: script.whole(b"", 307, Location="/elsewhere"), "status 307"),
    "a huge line": (
        lambda script, _: script.chunks(b"data: " + b"#" * (2 * MAX_LINE_BYTES)),
        "it sends lines of over 1 MiB",
    ),
    "much": (
        lambda script, _: script.chunks(*[b":" + b"#" * 65534 + b"\n"] * (MAX_BYTES >> 16), HALF),
        "it sends more than 16 MiB",
    ),
    "no JSON": (lambda script, _: script.chunks(b"data: {\n\n"), NO_EVENT),
    "deep": (lambda script, _: script.chunks(b"data: " + b"[" * 100_000 + b"\n\n"), NO_EVENT),
    "a list": (lambda script, _: script.chunks(event([1])), NO_EVENT),
    "no text": (lambda script, _: script.chunks(event({"choices": [{"text": 5}]})), NO_EVENT),
    "less than no tokens": (
        lambda script, body: script.chunks(answer("", body, cached=-1)),
        NO_EVENT,
    ),
    "nothing": (lambda script, _: script.chunks(b"data: [DONE]\n\n"), "an answer without tokens"),
    "slow": (slowly, "no whole answer within 3 s"),
}
"""Behaviours of a server, and the kind of error that each one causes."""


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_counted_by_its_kind_and_ends_its_conversation(
    lie: str, server: Scripted, tmp_path: Path
) -> None:
    behave, kind = LIES[lie]
    server.behave(behave)
    file = tmp_path / "result.json"
    options = ("--requests", "4", "--turns", "2", "--timeout-s", "3" if lie == "slow" else "60")
    told = kvtier(server.url, *options, "--json", str(file))
    assert told.exit_code == 1, told.output
    result = json.loads(file.read_text())
    assert [(each["kind"], each["requests"]) for each in result["errors"]] == [(kind, 2)]
    assert result["not_sent"] == 2
    assert len(server.bodies) == 3
    assert f"2 requests failed: {kind}" in told.output
    assert "2 requests not sent" in told.output
    assert "\x1b]" not in told.output
    assert "a model [bold]\\x1b]0;title\\x07" in told.output


def test_a_first_request_that_fails_ends_the_command(server: Scripted) -> None:
    server.bodies.append({})  # so that the first request fails, too
    server.behave(LIES["refused"][0])
    told = kvtier(server.url)
    assert told.exit_code == 2
    assert told.output.count("\n") == 1
    assert "status 429: [bold]\\x1b]0;title\\x07" in told.output


def test_a_turn_repeats_its_conversation(server: Scripted) -> None:
    server.behave(lambda script, body: script.chunks(answer(" <said> ", body)))
    result = found(server.url, "--requests", "6", "--turns", "3", "--concurrency", "1")
    first, second = server.prompts()[::2], server.prompts()[1::2]
    assert first[0] != second[0]
    # 40 tokens are shared.
    shared = re.compile(re.escape(first[0][:160]))
    assert all(shared.match(prompt) for prompt in server.prompts())
    for conversation in (first, second):
        assert len(conversation[0]) == 160 + 80
        for before, after in pairwise(conversation):
            assert after.startswith(before + " <said> ")
            assert len(after) == len(before) + len(" <said> ") + 80
    assert result["all"]["cached_tokens"] is None
    assert result["all"]["prompt_tokens"] == sum(len(prompt) // 4 for prompt in server.prompts())


def test_a_chat_has_its_turns_by_role(server: Scripted) -> None:
    server.behave(lambda script, body: script.chunks(answer("said", body, cached=7)))
    result = found(server.url, "--requests", "2", "--turns", "2", "--chat", "--model", "mine")
    last = server.bodies[-1]
    assert [each["role"] for each in last["messages"]] == ["user", "assistant", "user"]
    assert last["messages"][:1] == server.bodies[1]["messages"]
    assert last["messages"][1]["content"] == "said"
    assert {body["model"] for body in server.bodies} == {"mine"}
    assert result["all"]["cached_tokens"] == 14


def test_as_many_are_asked_at_a_time_as_wanted(server: Scripted) -> None:
    together, lock = Barrier(3), Lock()
    running, most = 0, 0

    def behave(script: Script, body: dict[str, Any]) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(60)
        with lock:
            running -= 1
        script.chunks(answer("said", body))

    server.behave(behave)
    result = found(server.url, "--requests", "6", "--turns", "1", "--concurrency", "3")
    assert (result["all"]["requests"], most) == (6, 3)


def test_a_seed_is_a_text(server: Scripted) -> None:
    server.behave(lambda script, body: script.chunks(answer("said", body)))
    asked = []
    for seed in ("1", "1", "2"):
        server.bodies.clear()
        found(server.url, "--requests", "4", "--seed", seed, "--concurrency", "1")
        asked.append(server.prompts())
    assert asked[0] == asked[1]
    assert asked[0] != asked[2]


def test_what_only_some_answers_tell_is_summed_over_those() -> None:
    def told(cached: int | None, seconds: float) -> Exchange:
        return Exchange("", seconds, 2 * seconds, 100, 1, cached)

    assert TurnFigures.of([]).ttft.median_ms is None
    few = TurnFigures.of([told(None, 1.0)] * 19)
    assert (few.cached_share, few.ttft.median_ms, few.ttft.p95_ms) == (None, 1000.0, None)
    # vLLM reports no cached tokens for a prompt without any.
    many = TurnFigures.of([told(40 if at == 0 else None, float(at)) for at in range(21)])
    assert many.cached_share == pytest.approx(40 / 2100)
    assert (many.ttft.median_ms, many.ttft.p95_ms) == (10_000.0, 19_000.0)
    assert many.end_to_end.median_ms == 20_000.0
