"""A server that speaks S3 from a dictionary, and alters its answers for a test.

It knows the few headers by which Google's XML interface differs, too.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.kit.servers import BUCKET
from tests.tiers.remote.scripted_server import LOOPBACK, Listener

WRITTEN = "2026-11-25T12:00:00.000Z"
WRITTEN_HTTP = "Wed, 25 Nov 2026 12:00:00 GMT"
TEXTS = {200: "OK", 206: "Partial Content", 404: "Not Found", 412: "Precondition Failed"}


@dataclass
class Answer:
    """An HTTP answer, not serialized."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def to_bytes(self, has_body: bool = True) -> bytes:
        given = {"content-length": str(len(self.body)), **self.headers}
        lines = [f"HTTP/1.1 {self.status} {TEXTS.get(self.status, 'Other')}"]
        lines += [f"{name}: {value}" for name, value in given.items()]
        head = "\r\n".join(lines).encode(errors="surrogateescape") + b"\r\n\r\n"
        return head + self.body if has_body else head


@dataclass(frozen=True)
class Question:
    """A request of S3. name: the object's name; "" for the bucket. query: its options."""

    method: str
    name: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


Alter = Callable[[Question, Answer], bytes]
"""Returns what is sent in the place of the right answer; b"" ends the connection."""


def unaltered(question: Question, answer: Answer) -> bytes:
    """Return the right answer."""
    return answer.to_bytes(question.method != "HEAD")


def listing(entries: dict[str, int], more: str = "") -> bytes:
    """Return a page of a list: names and sizes. more: the token of the next page."""
    token = f"<NextContinuationToken>{escape(more)}</NextContinuationToken>" if more else ""
    contents = "".join(
        f"<Contents><Key>{escape(name)}</Key><LastModified>{WRITTEN}</LastModified>"
        f'<ETag>"{number}"</ETag><Size>{size}</Size></Contents>'
        for number, (name, size) in enumerate(entries.items())
    )
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>{BUCKET}</Name>'
        f"<KeyCount>{len(entries)}</KeyCount><IsTruncated>{str(bool(more)).lower()}</IsTruncated>"
        f"{token}{contents}</ListBucketResult>"
    ).encode()


def refusal(status: int, code: str) -> Answer:
    """Return an error as S3 writes it."""
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
    return Answer(status, {"content-type": "application/xml"}, body.encode())


class ScriptedBucket(Listener):
    """Speaks S3. ``objects`` is its content.

    ends: close the connection after an altered answer, so that the client does not wait for more.
    """

    def __init__(self, alter: Alter = unaltered, ends: bool = False) -> None:
        self._ends = ends
        self.alter = alter
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()
        super().__init__()
        self.url = f"http://{LOOPBACK}:{self.port}"

    def _serve(self, line: socket.socket) -> None:
        with suppress(OSError, ValueError), line, line.makefile("rb") as sent:
            while start := sent.readline():
                headers = {}
                for each in iter(sent.readline, b"\r\n"):
                    name, _, value = each.decode().partition(":")
                    headers[name.lower()] = value.strip()
                method, target, _ = start.decode().split()
                parts = urlsplit(target)
                name = unquote(parts.path).removeprefix(f"/{BUCKET}").lstrip("/")
                body = sent.read(int(headers.get("content-length", 0)))
                query = parse_qs(parts.query, keep_blank_values=True)
                question = Question(method, name, query, headers, body)
                with self._lock:
                    answer = self._answer(question)
                right = unaltered(question, answer)
                reply = self.alter(question, answer)
                if not reply:
                    return
                line.sendall(reply)
                if self._ends and reply != right:
                    return

    def _answer(self, asked: Question) -> Answer:
        if asked.method == "POST":  # the only one: to delete several
            names = re.findall(r"<Key>([^<]*)</Key>", asked.body.decode())
            for name in names:
                self.objects.pop(name, None)
            deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            return Answer(body=f"<DeleteResult>{deleted}</DeleteResult>".encode())
        if not asked.name:
            prefix = asked.query.get("prefix", [""])[0]
            found = {
                n: len(each) for n, each in sorted(self.objects.items()) if n.startswith(prefix)
            }
            return Answer(200, {"content-type": "application/xml"}, listing(found))
        if asked.method == "PUT":
            is_new = "*" in asked.headers.get("if-none-match", "")
            is_new |= asked.headers.get("x-goog-if-generation-match") == "0"
            if is_new and asked.name in self.objects:
                return refusal(412, "PreconditionFailed")
            self.objects[asked.name] = asked.body
            return Answer(200, {"etag": version_of(asked.body)})
        if asked.method == "DELETE":
            return Answer(204 if self.objects.pop(asked.name, None) is not None else 404)
        content = self.objects.get(asked.name)
        if content is None:
            return refusal(404, "NoSuchKey")
        facts = {"etag": version_of(content), "last-modified": WRITTEN_HTTP}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", asked.headers.get("range", "")):
            first, last = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
            if first > last:
                return refusal(416, "InvalidRange")
            facts["content-range"] = f"bytes {first}-{last}/{len(content)}"
            return Answer(206, facts, content[first : last + 1])
        return Answer(200, facts, content)


def version_of(content: bytes) -> str:
    """Return the version of an object, as S3 writes it."""
    return f'"{blake2b(content, digest_size=8).hexdigest()}"'
