"""HTTP client for commands that query a server: bounded in time and size, no redirects."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
    IncompleteRead,
)
from pathlib import Path
from threading import Lock, Timer
from types import TracebackType
from typing import Any, Self
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

from kvtier.core.errors import CacheError, ConfigError, printable
from kvtier.core.system.hosts import is_local

MAX_BYTES = 16 << 20
"""Most bytes of an answer."""
MAX_LINE_BYTES = 1 << 20
"""Most bytes of a line in a streamed answer."""
PIECE_BYTES = 64 << 10
"""Most bytes of a streamed answer per read."""
MAX_REFUSAL_BYTES = 64 << 10
"""Most bytes of an error's body that are read."""
MAX_REASON = 200
"""Most characters of a library's error text that are shown."""
MAX_SAID = 1000
"""Most characters of a server's error message that are shown."""
CUT = "the connection ended within the answer"


class NoAnswerError(CacheError):
    """The server cannot be reached, was too slow, or sent too much. ``why`` says which."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"{url} does not answer: {why}")
        self.why = why


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

    @property
    def said(self) -> str:
        """The server's own error message, printable; "" if there is none."""
        try:
            return error_message(json.loads(self.content))
        except (ValueError, RecursionError):
            return ""


def error_message(body: object) -> str:
    """Return the message of an error of OpenAI's API, printable; "" if ``body`` is no error."""
    found = body.get("error", body) if isinstance(body, dict) else None
    said = found.get("message") if isinstance(found, dict) else found
    return printable(said[:MAX_SAID]) if isinstance(said, str) else ""


def check_url(url: str) -> str:
    """Return ``url``, with ``http://`` in front if it has no scheme.

    Raises:
        ConfigError: it is no HTTP address of a server, or has a password in it.
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


def check_api_key(key: str, name: str = "api_key") -> str:
    """Return ``key``. name: of its setting, for the message.

    Raises:
        ConfigError: it can't be sent in a header. The message does not contain it.
    """
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{name}: a key has characters that no header can send; use printable ASCII without "
            "blanks"
        )
    return key


def server_url(url: str) -> str:
    """Return a server's base URL, from its address with or without ``/v1``.

    Raises ``ConfigError`` like ``check_url``.
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
        url: address of the request.
        timeout_s: timeout of the whole exchange.
        headers: headers of the request.
        content: body of a POST; None for a GET.
        api_key: sent to this server only: redirects are not followed, and a proxy of the
            environment is not used if it could read the key.

    Raises:
        RefusedError: the status is not 2xx.
        NoAnswerError: no complete answer arrived within ``timeout_s`` and ``MAX_BYTES``.
    """
    with _answer(url, timeout_s, headers, content, api_key) as answer:
        found: bytes = answer.read(MAX_BYTES + 1)
        is_cut = len(found) <= MAX_BYTES and bool(answer.length)
    if is_cut:
        raise NoAnswerError(url, CUT)
    if len(found) > MAX_BYTES:
        raise NoAnswerError(url, f"it sends more than {MAX_BYTES >> 20} MiB")
    return found


def stream(
    url: str,
    timeout_s: float,
    headers: dict[str, str],
    content: bytes | None = None,
    api_key: str | None = None,
) -> Generator[bytes, None, None]:
    """Yield the lines of the answer as they arrive, without their line ends.

    Arguments and errors are those of ``fetch``; the timeout is for the whole answer. A line longer
    than ``MAX_LINE_BYTES`` raises ``NoAnswerError``, too. Close the generator to leave the rest
    unread.
    """
    num_bytes, line = 0, bytearray()
    with _answer(url, timeout_s, headers, content, api_key) as answer:
        for piece in _pieces(answer):
            num_bytes += len(piece)
            if num_bytes > MAX_BYTES:
                raise NoAnswerError(url, f"it sends more than {MAX_BYTES >> 20} MiB")
            line += piece
            if b"\n" in piece:
                *whole, line = line.split(b"\n")
                yield from (bytes(each.removesuffix(b"\r")) for each in whole)
            if len(line) > MAX_LINE_BYTES:
                raise NoAnswerError(url, f"it sends lines of over {MAX_LINE_BYTES >> 20} MiB")
    if line:
        yield bytes(line)


def _pieces(answer: HTTPResponse) -> Iterator[bytes]:
    """Yield the body as it arrives. Raise ``IncompleteRead`` if the connection ends within it.

    ``readline`` is not used, since it takes a broken connection for the end.
    """
    left = answer.length
    while (left is None or left > 0) and (piece := answer.read1(PIECE_BYTES)):
        left = None if left is None else left - len(piece)
        yield piece
    if left is not None and left > 0:
        raise IncompleteRead(b"", left)


@contextmanager
def _answer(
    url: str,
    timeout_s: float,
    headers: dict[str, str],
    content: bytes | None,
    api_key: str | None,
) -> Iterator[HTTPResponse]:
    """Send a request and yield its answer. Errors in the block are converted as by ``fetch``."""
    sent = {**headers, **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
    with _Deadline(timeout_s) as deadline:
        request = Request(url, content, sent)
        try:
            try:
                with _opener(request, deadline).open(request, timeout=timeout_s) as answer:
                    yield answer
            except HTTPError as error:
                with error:
                    raise RefusedError(url, error.code, error.read(MAX_REFUSAL_BYTES)) from None
        except (OSError, ValueError, HTTPException) as error:
            is_late = deadline.is_over or isinstance(getattr(error, "reason", error), TimeoutError)
            raise NoAnswerError(url, _too_slow(timeout_s) if is_late else _reason(error)) from None
        if deadline.is_over:  # a connection that was shut down looks like the end of an answer
            raise NoAnswerError(url, _too_slow(timeout_s))


def _opener(request: Request, deadline: _Deadline) -> OpenerDirector:
    made = OpenerDirector()
    for each in (
        *(() if _is_direct(request) else (ProxyHandler(),)),
        _Https(deadline) if request.type == "https" else _Http(deadline),
        HTTPDefaultErrorHandler(),
        _NoRedirects(),
        HTTPErrorProcessor(),
    ):
        made.add_handler(each)
    return made


def _is_direct(request: Request) -> bool:
    """Return whether no proxy of the environment may be used.

    A proxy cannot reach this machine's loopback address. It reads all of a plain HTTP request, and
    only the host of an HTTPS request.
    """
    has_readable_key = request.type == "http" and request.has_header("Authorization")
    return has_readable_key or is_local(urlsplit(request.full_url).hostname or "")


@cache
def _tls() -> ssl.SSLContext:
    """Return the TLS context of all connections, cached since reading certificates is slow."""
    return ssl.create_default_context()


def _too_slow(timeout_s: float) -> str:
    return f"no whole answer within {timeout_s:g} s"


def _reason(error: Exception) -> str:
    """Describe a failure without quoting what the server sent."""
    if isinstance(error, IncompleteRead):
        return CUT
    if isinstance(error, HTTPException):
        return "it does not speak HTTP"
    why = getattr(error, "reason", error)
    text = (why.strerror if isinstance(why, OSError) else "") or str(why) or type(why).__name__
    return printable(text[:MAX_REASON])


class _NoRedirects(HTTPRedirectHandler):
    """Refuses redirects, so that an API key is sent only to the server that was named."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


class _Deadline:
    """Shuts down the connections of one exchange when its timeout expires.

    A socket's own timeout restarts with every byte.
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
        """Keep a duplicate of a socket, since TLS takes over the socket itself."""
        with self._lock:
            self._sockets.append(connected.dup())
        if self.is_over:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self.is_over = True
            for each in self._sockets:
                with suppress(OSError):  # the server may have closed it already
                    each.shutdown(socket.SHUT_RDWR)


class _Plain(HTTPConnection):
    deadline: _Deadline

    def connect(self) -> None:
        super().connect()
        self.deadline.watch(self.sock)


class _Secure(HTTPSConnection, _Plain):
    """HTTPS connection, whose ``connect`` calls ``_Plain.connect`` before the handshake."""


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


class UnixConnection(HTTPConnection):
    """HTTP connection over a Unix socket. timeout_s: longest wait for each of its parts."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class _Https(HTTPSHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__(context=_tls())
        self._connection = partial(_connection, _Secure, deadline, context=_tls())

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(self._connection, req)
