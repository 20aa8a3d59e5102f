"""A small Hugging Face hub on loopback, for the calls with which models are downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

TOKEN = "hf_loopback"


@dataclass(eq=False)
class Hub:
    """Models by name, each a folder.

    Attributes:
        folders: folders of the models by their names.
        gated: names that need ``TOKEN``.
        downloaded: files whose content was requested, in order.
        num_requests: requests of all kinds.
    """

    folders: Mapping[str, Path]
    gated: frozenset[str] = frozenset()
    url: str = ""
    downloaded: list[str] = field(default_factory=list)
    num_requests: int = 0

    def commit(self, name: str) -> str:
        return sha1(name.encode()).hexdigest()

    def files(self, name: str) -> dict[str, Path]:
        folder = self.folders[name]
        return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


@contextmanager
def hub(folders: Mapping[str, Path], gated: frozenset[str] = frozenset()) -> Iterator[Hub]:
    """Serve models on a free port."""
    found = Hub(folders, gated)

    class Handler(_Handler):
        hub = found

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Write no log."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        self.hub.num_requests += 1
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, model, *rest = parts[2:] if is_api else parts
        name = f"{owner}/{model}"
        if name not in self.hub.folders:
            # As the hub answers: it does not say whether a private model exists.
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
        elif name in self.hub.gated and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
        elif (rest[1:2] or ["main"])[0] not in ("main", self.hub.commit(name)):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, with_body)
        elif not is_api:
            self._file(name, "/".join(rest[2:]), with_body)
        elif rest[:1] == ["tree"]:
            self._json([
                {"type": "file", "path": file, "size": path.stat().st_size, "oid": _oid(path)}
                for file, path in self.hub.files(name).items()
            ])  # fmt: skip
        else:
            siblings = [
                {"rfilename": file, "size": path.stat().st_size}
                for file, path in self.hub.files(name).items()
            ]
            self._json({"id": name, "sha": self.hub.commit(name), "siblings": siblings})

    def _file(self, name: str, file: str, with_body: bool) -> None:
        path = self.hub.files(name).get(file)
        if path is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
            return
        if with_body:
            self.hub.downloaded.append(file)
        headers = {"ETag": f'"{_oid(path)}"', "X-Repo-Commit": self.hub.commit(name)}
        self._send(200, path.read_bytes(), headers, with_body)

    def _json(self, found: object) -> None:
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"}, True)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _oid(path: Path) -> str:
    return sha1(path.read_bytes()).hexdigest()
