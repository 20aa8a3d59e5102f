"""The HTTP client of the monitoring commands, over real sockets, against misbehaving servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event
from urllib.parse import urlsplit

import pytest

from kvtier.core.errors import ConfigError
from kvtier.observe.live.client import (
    MAX_BYTES,
    MAX_LINE_BYTES,
    NoAnswerError,
    RefusedError,
    check_url,
    fetch,
    stream,
)
from kvtier.tools.cli.api_keys import take_key

from .test_scrape import kvtier, serving

KEY = "frobozz-key"
PATIENCE_S = 20.0
OPTIONS = {
    "explain": ("--prompt-file", __file__),
    "top": ("--once",),
    "watch": ("--port", "0"),
    "ping": (),
    "describe": (),
}
EXPLAINED = {
    "prompt_tokens": 3,
    "reused_tokens": 0,
    "parts": [],
    "not_used": [],
    "rejected": [],
    "predicted": {"load_s": 0.0, "compute_s": 1.0},
    "took": {"load_s": None, "first_token_s": 1.0, "wait_s": None},
    "notes": [],
    "too_few_measurements": [],
}


class Liar(BaseHTTPRequestHandler):
    """Handler whose behaviour the path selects. ``server.seen`` has every request's headers."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.seen.append(dict(self.headers))  # type: ignore[attr-defined]
        with suppress(OSError):  # the client has disconnected
            getattr(self, "tell_" + urlsplit(self.path).path.split("/")[1])()

    def do_CONNECT(self) -> None:
        assert "Authorization" not in self.headers
        self.server.tunnels.append(self.path)  # type: ignore[attr-defined]
        self.send_error(503)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def tell_moved(self) -> None:
        self.send_response(302)
        self.send_header("Location", self.server.elsewhere)  # type: ignore[attr-defined]
        self.send_header("Content-Length", "0")
        self.end_headers()

    def tell_json(self) -> None:
        self._send(self.server.answer)  # type: ignore[attr-defined]

    def tell_much(self) -> None:
        self._send(b"#" * (MAX_BYTES + 1))

    def tell_no(self) -> None:
        self.send_response(500, "a\x1b[31mreason")
        self.send_header("Content-Length", str(10 << 20))
        self.end_headers()
        self.wfile.write(b"x" * (10 << 20))

    def tell_half(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "10")
        self.end_headers()
        self.wfile.write(b"half")
        self.close_connection = True

    def tell_slowly(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "400")
        self.end_headers()
        self._trickle(b"x" * 400)

    def tell_headslowly(self) -> None:
        self._trickle(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 400 + b"\r\nContent-Length: 0\r\n\r\n")

    def tell_lines(self) -> None:
        """Send two lines; send the second one only after the client has received the first."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\none\r\n\r\n")
        if self.server.is_over.wait(PATIENCE_S):  # type: ignore[attr-defined]
            self.wfile.write(b"3\r\ntwo\r\n0\r\n\r\n")

    def tell_cutlines(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"4\r\none\n\r\n")
        self.close_connection = True

    def tell_longline(self) -> None:
        self._send(b"#" * (2 * MAX_LINE_BYTES) + b"\n")

    def tell_manylines(self) -> None:
        self._send((b"#" * 1023 + b"\n") * (MAX_BYTES >> 10) + b"\n")

    def tell_noise(self) -> None:
        self.wfile.write(b"\x1b[31m220 not HTTP\r\n\r\n")
        self.close_connection = True

    def _trickle(self, content: bytes) -> None:
        """Send one byte at a time, each before a socket timeout could expire."""
        for each in content:
            self.wfile.write(bytes([each]))
            if self.server.is_over.wait(0.05):  # type: ignore[attr-defined]
                return

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


class Server:
    """A running HTTP server with ``Liar`` as its handler."""

    def __init__(self, stack: ExitStack) -> None:
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
        self.seen: list[dict[str, str]] = []
        self.is_over = Event()
        self.tunnels: list[str] = []
        vars(self.http).update(
            seen=self.seen,
            tunnels=self.tunnels,
            is_over=self.is_over,
            elsewhere="",
            answer=b"{}",
        )
        self.url = stack.enter_context(serving(self.http))
        stack.callback(self.is_over.set)

    def answer(self, value: object) -> None:
        vars(self.http)["answer"] = json.dumps(value).encode()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def server(stack: ExitStack) -> Server:
    return Server(stack)


def told(url: str, timeout_s: float = PATIENCE_S) -> str:
    with pytest.raises((NoAnswerError, RefusedError)) as caught:
        fetch(url, timeout_s, {}, api_key=KEY)
    assert KEY not in str(caught.value)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize("command", OPTIONS)
def test_a_key_goes_to_the_named_server_only(
    command: str, stack: ExitStack, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Server(stack)
    other.answer({"data": [{"id": "m"}], "usage": {"kvtier": [EXPLAINED]}})
    vars(server.http)["elsewhere"] = f"{other.url}/json"
    monkeypatch.setattr("kvtier.tools.cli.top.FIRST_S", 0.0)
    monkeypatch.setattr("kvtier.observe.live.local.LocalServer.serve_forever", lambda self: None)
    code, output = kvtier(command, f"{server.url}/moved", "--api-key", KEY, *OPTIONS[command])
    assert (code != 0) == (command != "watch"), output
    assert "302" in output
    assert server.seen[0]["Authorization"] == f"Bearer {KEY}"
    assert other.seen == []


@pytest.mark.parametrize("command", OPTIONS)
def test_requests_to_this_machine_go_to_no_proxy(
    command: str, stack: ExitStack, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Server(stack)
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setattr("kvtier.tools.cli.top.FIRST_S", 0.0)
    monkeypatch.setattr("kvtier.observe.live.local.LocalServer.serve_forever", lambda self: None)
    for name in ("127.0.0.1", "localhost"):
        url = server.url.replace("127.0.0.1", name)
        kvtier(command, f"{url}/json", "--api-key", KEY, *OPTIONS[command])
    assert proxy.seen == []
    assert {each["Host"].partition(":")[0] for each in server.seen} == {"127.0.0.1", "localhost"}


def test_a_key_goes_to_no_proxy_that_can_read_it(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the proxy could resolve the server's name."""
    proxy = Server(stack)
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setenv("https_proxy", proxy.url)
    for scheme in ("http", "https"):
        with pytest.raises(NoAnswerError):
            fetch(f"{scheme}://server.invalid/json", PATIENCE_S, {}, api_key=KEY)
    assert proxy.seen == []
    assert proxy.tunnels == ["server.invalid:443"]
    assert fetch("http://server.invalid/json", PATIENCE_S, {}) == b"{}"
    assert [each["Host"] for each in proxy.seen] == ["server.invalid"]


@pytest.mark.parametrize("path", ["slowly", "headslowly"])
def test_the_time_is_for_the_whole_answer(server: Server, path: str) -> None:
    assert "no whole answer within 0.3 s" in told(f"{server.url}/{path}", 0.3)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("much", "sends more than 16 MiB"),
        ("half", "the connection ended within the answer"),
        ("noise", "does not speak HTTP"),
        ("no", "answers 500"),
        ("moved", "answers 302"),
    ],
)
def test_a_lie_is_one_sentence_without_what_was_sent(server: Server, path: str, why: str) -> None:
    assert why in told(f"{server.url}/{path}")


def test_a_line_is_there_before_the_next_one(server: Server) -> None:
    lines = stream(f"{server.url}/lines", PATIENCE_S, {}, b"{}", KEY)
    assert next(lines) == b"one"
    server.is_over.set()
    assert list(lines) == [b"two"]
    assert server.seen[0]["Authorization"] == f"Bearer {KEY}"


def test_the_rest_of_a_stream_need_not_be_read(server: Server) -> None:
    lines = stream(f"{server.url}/lines", PATIENCE_S, {})
    assert next(lines) == b"one"
    lines.close()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("longline", "sends lines of over 1 MiB"),
        ("manylines", "sends more than 16 MiB"),
        ("cutlines", "the connection ended within the answer"),
        ("half", "the connection ended within the answer"),
        ("noise", "does not speak HTTP"),
        ("no", "answers 500"),
        ("moved", "answers 302"),
    ],
)
def test_a_stream_ends_with_one_sentence(server: Server, path: str, why: str) -> None:
    with pytest.raises((NoAnswerError, RefusedError), match=why):
        list(stream(f"{server.url}/{path}", PATIENCE_S, {}, api_key=KEY))


def test_the_time_of_a_stream_is_for_all_of_it(server: Server) -> None:
    with pytest.raises(NoAnswerError, match=r"no whole answer within 0\.3 s"):
        list(stream(f"{server.url}/slowly", 0.3, {}))


def test_only_the_beginning_of_a_refusal_is_read(server: Server) -> None:
    with pytest.raises(RefusedError) as caught:
        fetch(f"{server.url}/no", PATIENCE_S, {})
    assert (caught.value.code, len(caught.value.content)) == (500, 64 << 10)


@pytest.mark.parametrize(
    "given", ["http://user:SECRET@h", "user:SECRET@h:1", "http://h/SECRET@x", "http://a@b@SECRET"]
)
def test_a_password_in_an_address_is_refused_and_not_told(given: str) -> None:
    with pytest.raises(ConfigError, match="it has an @ in it") as caught:
        check_url(given)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("given", ["two words", "ké", "line\nline", "a\tb"])
def test_a_key_that_no_header_can_send_is_refused_and_not_told(given: str) -> None:
    for command, options in OPTIONS.items():
        code, output = kvtier(command, "http://127.0.0.1:1", "--api-key", given, *options)
        assert code == 2
        assert "a key has characters that no header can send" in output
        assert given not in output


def test_the_environments_key_is_taken_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_API_KEY", f"{KEY} second")
    assert take_key(None) == KEY
    assert "KVTIER_API_KEY" not in os.environ
    assert take_key(None) is None


@pytest.mark.parametrize("command", OPTIONS)
def test_the_process_list_does_not_show_a_key(command: str, server: Server) -> None:
    """Read the process list while the server delays its answer."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvtier.tools.cli", command, f"{server.url}/slowly"),
            *("--api-key", KEY, *OPTIONS[command]),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not server.seen:
            assert process.poll() is None
            server.is_over.wait(0.02)
        line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert command.encode() in line
        assert KEY.encode() not in line
    finally:
        process.kill()
        process.wait()


# -- what a server explains ------------------------------------------------------------------------


def shown(server: Server, found: object, *options: str) -> tuple[int, str]:
    server.answer({"data": [{"id": "a [bold]model\x1b[31m"}], "usage": {"kvtier": [found]}})
    return kvtier("explain", f"{server.url}/json", "--prompt-file", __file__, *options)


def test_text_of_a_server_is_shown_as_text(server: Server) -> None:
    evil = "[/x][bold]\x1b]0;title\x07"
    parts = [
        {
            "first": 0,
            "end": 3,
            "from": evil,
            "measured": 1,
            "predicted_s": 1.0,
            "took_s": 1,
            "compute_s": None,
        }
    ]
    found = {
        **EXPLAINED,
        "parts": parts,
        "notes": [evil],
        "not_used": [{"first": 0, "end": 1, "in": evil}],
        "too_few_measurements": [{"of": evil, "number": 1}],
    }
    code, output = shown(server, found)
    assert code == 0, output
    assert "\x1b" not in output
    assert "\x07" not in output
    assert output.count("[/x][bold]\\x1b]0;title\\x07") >= 3
    assert "a [bold]model\\x1b[31m at" in output


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_tokens": "3"},
        {"prompt_tokens": True},
        {"prompt_tokens": 10**400},
        {"prompt_tokens": -1},
        {"parts": None},
        {"parts": [{}]},
        {"notes": ["x"] * 10_001},
        {"notes": ["x" * 1001]},
        {"took": {"load_s": float("nan"), "first_token_s": None, "wait_s": None}},
        {"took": {"load_s": float("inf"), "first_token_s": None, "wait_s": None}},
        {"predicted": []},
    ],
)
@pytest.mark.parametrize("option", [(), ("--json",)])
def test_what_is_no_explanation_is_said_so(
    server: Server, change: dict[str, object], option: tuple[str, ...]
) -> None:
    code, output = shown(server, {**EXPLAINED, **change}, *option)
    assert (code, output.count("\n")) == (2, 1)
    assert "answers, but " in output


def test_deep_json_is_none(server: Server) -> None:
    vars(server.http)["answer"] = b"[" * 1_000_000
    code, output = kvtier("explain", f"{server.url}/json", "--prompt-file", __file__)
    assert (code, "answers, but not in JSON" in output) == (2, True)
