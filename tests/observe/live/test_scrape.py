"""An engine's metrics over real HTTP, and the page for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from typer.testing import CliRunner

from kvtier.core.errors import ConfigError
from kvtier.observe.live.client import MAX_BYTES
from kvtier.observe.live.files import HEADERS, LIVE_PATH, TYPES, content_of
from kvtier.observe.live.local import LocalServer
from kvtier.observe.live.scrape import ScrapeError, WatchedEngine, metrics_url, read_text
from kvtier.tools.cli import app

from .texts import RECORDED

KEY = "a key"


class Engine(BaseHTTPRequestHandler):
    """Handler that serves recorded metrics of an engine. Other paths misbehave."""

    def do_GET(self) -> None:
        kind = self.path.rpartition("/")[2]
        self.server.num_asked += 1  # type: ignore[attr-defined]
        if kind == "locked" and self.headers["Authorization"] != f"Bearer {KEY}":
            self.send_error(401)
        elif kind == "moved":
            self.send_response(302)
            self.send_header("Location", "/metrics")
            self.end_headers()
        elif kind == "much":
            self._send(b"#" * (MAX_BYTES + 1))
        elif kind == "page":
            self._send(b"<html>hello</html>")
        elif kind in ("metrics", "locked"):
            self._send((RECORDED / "kvtier-2.txt").read_bytes())
        else:
            self.send_error(404)

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield "http://{}:{}".format(*server.server_address[:2])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def server() -> ThreadingHTTPServer:
    made = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    made.num_asked = 0  # type: ignore[attr-defined]
    return made


@pytest.fixture
def engine(server: ThreadingHTTPServer) -> Iterator[str]:
    with serving(server) as url:
        yield url


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:1", "http://h:1/metrics"),
        ("h:8000", "http://h:8000/metrics"),
        ("https://h/", "https://h/metrics"),
        ("http://h:1/x/metrics", "http://h:1/x/metrics"),
    ],
)
def test_an_address_is_enough(given: str, url: str) -> None:
    assert metrics_url(given) == url


@pytest.mark.parametrize("given", ["", "ftp://h", "http://", "http://h:99999999", "file:///etc/x"])
def test_what_is_no_address_is_told(given: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a server"):
        metrics_url(given)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("locked", "answers 401: it wants an API key"),
        ("nothing", "answers 404: it has no metrics"),
        ("moved", "answers 302: it refuses"),
        ("much", "sends more than 16 MiB"),
    ],
)
def test_what_is_no_answer_is_told(engine: str, path: str, why: str) -> None:
    with pytest.raises(ScrapeError, match=why):
        read_text(f"{engine}/{path}")


def test_the_key_is_sent(engine: str) -> None:
    seen = WatchedEngine.at(f"{engine}/x/locked", KEY).look()
    assert seen.picture is not None
    assert seen.picture["engine"] == "kvtier"


def test_something_else_that_answers_is_told_so(engine: str) -> None:
    seen = WatchedEngine.at(f"{engine}/x/page").look()
    assert (seen.picture, "no Prometheus metrics" in seen.error) == (None, True)


def test_an_engine_is_asked_once_for_all_who_look(engine: str, server: ThreadingHTTPServer) -> None:
    watched = WatchedEngine.at(engine)
    assert len({id(watched.look()) for _ in range(20)}) == 1
    assert server.num_asked == 1  # type: ignore[attr-defined]


def get(url: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection(url.removeprefix("http://").rstrip("/"), timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


@pytest.fixture
def page(engine: str) -> Iterator[str]:
    with serving(LocalServer(WatchedEngine.at(engine))) as url:
        yield url


def test_every_file_of_the_page_is_served_with_a_strict_policy(page: str) -> None:
    for path in ["/", *(f"/kvtier/page/{name}" for name in TYPES)]:
        status, headers, content = get(page, path)
        assert (status, len(content) > 0) == (200, True)
        assert HEADERS.items() <= headers.items()


def test_nothing_else_is_served(page: str) -> None:
    for path in ("/x", "/kvtier/page/", "/kvtier/page/../files.py", "/kvtier/page/%2e%2e/make.py"):
        assert get(page, path)[0] == 404


def test_the_page_needs_nothing_from_elsewhere_and_has_nothing_inline() -> None:
    text = content_of("index.html").decode()
    assert "style=" not in text
    assert all(f"{scheme}://" not in text for scheme in ("http", "https"))
    assert text.count("<script") == text.count('<script type="module" src="/kvtier/page/')
    for name in TYPES:
        scripts = content_of(name).decode()
        assert "innerHTML" not in scripts
        assert "https://" not in scripts


def test_the_picture_is_served_or_why_there_is_none(engine: str, page: str) -> None:
    status, _, content = get(page, LIVE_PATH)
    assert (status, json.loads(content)["engine"]) == (200, "kvtier")
    with serving(LocalServer(WatchedEngine.at(f"{engine}/x/page"))) as url:
        status, _, content = get(url, LIVE_PATH)
    assert (status, "no Prometheus metrics" in json.loads(content)["error"]) == (502, True)


def test_a_page_from_elsewhere_cant_ask_by_a_name_of_its_own(page: str) -> None:
    assert get(page, LIVE_PATH, Host="evil.example:80")[0] == 403
    assert get(page, LIVE_PATH, Host="localhost:80")[0] == 200


def kvtier(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def test_top_once_is_for_scripts(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tools.cli.top.FIRST_S", 0.9)
    code, output = kvtier("top", engine, "--json")
    assert (code, json.loads(output)["engine"]) == (0, "kvtier")
    code, output = kvtier("top", engine, "--once")
    assert code == 0
    assert all(word in output for word in ("host", "disk", "Is it worth its memory?", "transfer"))


def test_top_says_what_it_cant_do(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tools.cli.top.FIRST_S", 0.0)
    assert kvtier("top", "ftp://h", "--once")[0] == 2
    code, output = kvtier("top", f"{engine}/nothing", "--once")
    assert (code, "it has no metrics" in output) == (2, True)


def test_watch_says_what_it_cant_do(page: str) -> None:
    code, output = kvtier("watch", "http://h:1", "--port", page.rpartition(":")[2])
    assert (code, "give another --host or --port" in output) == (2, True)
    assert kvtier("watch", "ftp://h")[0] == 2
