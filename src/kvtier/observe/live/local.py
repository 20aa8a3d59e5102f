"""Local HTTP server of the live page, for an engine that does not serve it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

from kvtier.observe.live.charts import EVERY_S
from kvtier.observe.live.files import HEADERS, HOUR_QUERY, LIVE_PATH, TYPES, content_of, name_of
from kvtier.observe.live.scrape import WatchedEngine

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


class LocalServer(ThreadingHTTPServer):
    """Serves the page and the picture of ``watched``. port: 0 for any free one.

    It also reads the metrics without viewers, so that the last hour of the charts has no gaps.

    On a loopback address it answers only requests whose Host header is a loopback name, to prevent
    DNS rebinding.
    """

    daemon_threads = True

    def __init__(self, watched: WatchedEngine, host: str = "127.0.0.1", port: int = 0) -> None:
        self.watched = watched
        self._is_closed = Event()  # set also if the port is taken
        super().__init__((host, port), _Handler)
        self._is_loopback = host in LOCAL_HOSTS
        Thread(target=self._watch, name="kvtier watch", daemon=True).start()

    def _watch(self) -> None:
        while not self._is_closed.wait(EVERY_S):
            self.watched.look()

    def server_close(self) -> None:
        self._is_closed.set()
        super().server_close()

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/"

    def knows(self, host: str) -> bool:
        """Whether a request with this Host header is answered."""
        name = host.rpartition(":")[0] or host
        return not self._is_loopback or name.strip("[]") in LOCAL_HOSTS


class _Handler(BaseHTTPRequestHandler):
    server: LocalServer
    protocol_version = "HTTP/1.1"
    server_version = "kvtier"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if not self.server.knows(self.headers.get("Host", "")):
            self._send(403, b"This server has another name.\n", "text/plain")
        elif (name := name_of(path)) is not None:
            self._send(200, content_of(name), TYPES[name])
        elif path == LIVE_PATH:
            seen = self.server.watched.look()
            picture = seen.picture
            watched: dict[str, object] = {"url": self.server.watched.url}
            if query == HOUR_QUERY:
                watched["hour"] = self.server.watched.hour()
            content = {"error": seen.error} if picture is None else picture | watched
            status = 502 if seen.picture is None else 200
            self._send(status, json.dumps(content).encode(), "application/json")
        else:
            self._send(404, b"There is no such page.\n", "text/plain")

    def _send(
        self, status: int, content: bytes, kind: str, headers: Mapping[str, str] = HEADERS
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""
