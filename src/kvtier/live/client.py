"""HTTP client for the commands that look at a server: bounded in time and size, no redirects."""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from threading import Lock, Timer
from types import TracebackType
from typing import Any, Self
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from kvtier.errors import CacheError, ConfigError, printable

MOST_BYTES = 16 << 20
"""Bytes of an answer that are read."""
MOST_REFUSAL_BYTES = 64 << 10
"""The same for an error's body."""
MOST_REASON = 200
"""Characters of a library's error text that are shown."""


class NoAnswerError(CacheError):
    """The server cannot be reached, was too slow, or sent too much. The text says which."""


class RefusedError(CacheError):
    """The server answered with an error status.

    Attributes:
        code: HTTP status.
        content: first bytes of the body; may be anything.
    """

    def __init__(self, url: str, code: int, content: bytes) -> None:
        super().__init__(f"{url} answers {code}")
        self.code = code
        self.content = content


def check_url(url: str) -> str:
    """Return ``url``, with ``http://`` in front where it names no scheme.

    Raises:
        ConfigError: It is no HTTP address of a server, or has a password in it.
    """
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_good = False
    if "@" in whole:
        raise ConfigError("URL: it has an @ in it; give http://host:port, and a key by itself")
    if not is_good or not whole.isascii() or not whole.isprintable() or " " in whole:
        raise ConfigError(f"URL: {url!r} is no address of a server; give http://host:port")
    return whole


def server_url(url: str) -> str:
    """Return the address below which a server's paths are, from its own or that of its ``/v1``.

    Raises ``ConfigError`` as ``check_url`` does.
    """
    return check_url(url).rstrip("/").removesuffix("/v1")


def fetch(
    url: str,
    timeout_s: float,
    headers: dict[str, str],
    content: bytes | None = None,
    api_key: str | None = None,
) -> bytes:
    """Return the body of the answer to a GET, or to a POST of ``content``.

    Args:
        timeout_s: For the exchange in all, however the bytes arrive.
        api_key: Sent to this server only: a redirect is an answer like any other.

    Raises:
        RefusedError: The status is not 2xx.
        NoAnswerError: No whole answer came within ``timeout_s`` and ``MOST_BYTES``.
    """
    sent = {**headers, **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
    with _Deadline(timeout_s) as deadline:
        open_ = build_opener(_NoRedirects, _Http(deadline), _Https(deadline)).open
        try:
            try:
                with open_(Request(url, content, sent), timeout=timeout_s) as answer:
                    found: bytes = answer.read(MOST_BYTES + 1)
                    is_cut = len(found) <= MOST_BYTES and bool(answer.length)
            except HTTPError as error:
                with error:
                    raise RefusedError(url, error.code, error.read(MOST_REFUSAL_BYTES)) from None
        except (OSError, ValueError, HTTPException) as error:
            if deadline.is_over or isinstance(getattr(error, "reason", error), TimeoutError):
                raise NoAnswerError(_too_slow(url, timeout_s)) from None
            raise NoAnswerError(f"{url} does not answer: {_reason(error)}") from None
        if deadline.is_over:  # a connection that was cut looks like the end of an answer
            raise NoAnswerError(_too_slow(url, timeout_s))
    if is_cut:
        raise NoAnswerError(f"{url} does not answer: the connection ended within the answer")
    if len(found) > MOST_BYTES:
        raise NoAnswerError(f"{url} sends more than {MOST_BYTES >> 20} MiB")
    return found


def _too_slow(url: str, timeout_s: float) -> str:
    return f"{url} does not answer: no whole answer within {timeout_s:g} s"


def _reason(error: Exception) -> str:
    """Describe a failure without what the server sent."""
    if isinstance(error, HTTPException):
        return "it does not speak HTTP"
    why = getattr(error, "reason", error)
    text = (why.strerror if isinstance(why, OSError) else "") or str(why) or type(why).__name__
    return printable(text[:MOST_REASON])


class _NoRedirects(HTTPRedirectHandler):
    """A key is for the server that was named, and for no other."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


class _Deadline:
    """Shuts the connections of one exchange down when its time is over.

    A socket's own timeout begins anew with every byte.
    """

    def __init__(self, timeout_s: float) -> None:
        self.is_over = False
        self._lock = Lock()
        self._sockets: list[socket.socket] = []
        self._timer = Timer(timeout_s, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        with self._lock:
            for each in self._sockets:
                each.close()
            self._sockets.clear()

    def watch(self, connected: socket.socket) -> None:
        """Keep a duplicate: TLS takes the socket itself over."""
        with self._lock:
            self._sockets.append(connected.dup())
        if self.is_over:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self.is_over = True
            for each in self._sockets:
                with suppress(OSError):  # the server may have been faster
                    each.shutdown(socket.SHUT_RDWR)


class _Plain(HTTPConnection):
    deadline: _Deadline

    def connect(self) -> None:
        super().connect()
        self.deadline.watch(self.sock)


class _Secure(HTTPSConnection, _Plain):
    """``HTTPSConnection.connect`` calls ``_Plain.connect`` before the handshake."""


def _connection(
    kind: type[_Plain], deadline: _Deadline, *arguments: Any, **named: Any
) -> HTTPConnection:
    made = kind(*arguments, **named)
    made.deadline = deadline
    return made


class _Http(HTTPHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._connection = partial(_connection, _Plain, deadline)

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(self._connection, req)


class _Https(HTTPSHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._connection = partial(_connection, _Secure, deadline)

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(self._connection, req)
