"""Raw HTTP, for requests that client libraries do not send."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from .conftest import MODEL, Running

COMPLETIONS = "/v1/completions"
ASKED = json.dumps({"model": MODEL, "prompt": "import", "max_tokens": 2, "temperature": 0}).encode()


@dataclass(frozen=True)
class RawAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> str:
        """Return the message of an error. Check the shape that every error has."""
        assert self.headers["content-type"] == "application/json", self
        shown: Any = json.loads(self.body)
        assert set(shown) == {"error"}, shown
        assert set(shown["error"]) == {"message", "type", "param", "code"}, shown
        message: str = shown["error"]["message"]
        assert message[-1] in ".?", message
        assert "\n" not in message
        assert "Traceback" not in message
        assert len(message) < 1000, message
        return message


def connect(served: Running) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=200)


def head(path: str, *fields: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *fields]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def request(path: str, body: bytes, *fields: str) -> bytes:
    return head(path, f"Content-Length: {len(body)}", *fields) + body


def read(connection: socket.socket) -> RawAnswer | None:
    """Return the next answer; None if the server closed the connection instead."""
    with connection.makefile("rb") as stream:
        try:
            line = stream.readline()
            if not line:
                return None
            headers: dict[str, str] = {}
            while (field := stream.readline().decode("latin-1").strip()) != "":
                name, _, value = field.partition(":")
                headers[name.lower()] = value.strip()
            if headers.get("transfer-encoding") == "chunked":
                body = b""
                while size := int(stream.readline(), 16):
                    body += stream.read(size)
                    stream.readline()
                stream.readline()
            else:
                body = stream.read(int(headers.get("content-length", "0")))
        except ConnectionResetError:
            return None
    return RawAnswer(int(line.split()[1]), headers, body)


def exchange(served: Running, sent: bytes) -> RawAnswer | None:
    """Return the server's answer to these bytes, sent on a new connection."""
    with connect(served) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(sent)
        return read(connection)


def answered(served: Running, sent: bytes) -> RawAnswer:
    found = exchange(served, sent)
    assert found is not None, "closed without an answer"
    return found


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes the connection without an answer."""
    return read(connection) is None


def metrics_of(served: Running) -> str:
    answer = httpx.get(f"{served.url}/metrics", timeout=200)
    assert answer.status_code == 200
    return answer.text
