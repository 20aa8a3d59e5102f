"""Raw HTTP, for requests that client libraries do not send, and what is common to answers."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

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
        """Return the message of an error."""
        message: str = error_in(self.headers, self.body)["message"]
        return message


def error_in(headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """Return the error object of an answer. Check the shape that every error has."""
    assert headers["content-type"] == "application/json", headers
    shown = json.loads(body)
    assert set(shown) == {"error"}, shown
    error: dict[str, Any] = shown["error"]
    assert set(error) == {"message", "type", "param", "code"}, shown
    message = error["message"]
    assert message[-1] in ".?", message
    assert "\n" not in message
    assert "Traceback" not in message
    assert len(message) < 1000, message
    return error


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return error_in(answer.headers, answer.content)


def dial(url: str) -> socket.socket:
    host, port = url.partition("://")[2].split(":")
    return socket.create_connection((host, int(port)), timeout=200)


def connect(served: Running) -> socket.socket:
    return dial(served.url)


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


def metrics_of(served: Running, **options: Any) -> str:
    answer = httpx.get(f"{served.url}/metrics", timeout=200, **options)
    assert answer.status_code == 200
    return answer.text


def samples(served: Running, **options: Any) -> Counter[tuple[str, ...]]:
    """Return the values of metrics by (name, label values in their order ...)."""
    families = text_string_to_metric_families(metrics_of(served, **options))
    found: Any = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    return Counter(found)
