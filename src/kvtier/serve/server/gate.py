"""Checks of every request before the API: identity, key, shutdown, size, number."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import time
import traceback
import uuid
from collections.abc import Sequence
from hashlib import sha256

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.control.doorman import MONITOR_PATHS
from kvtier.control.routes import PATHS
from kvtier.observe.live.files import LIVE_PATH, name_of
from kvtier.serve.server.bodies import Body
from kvtier.serve.server.errors import (
    ApiError,
    body_compressed,
    crowded,
    internal_error,
    shutting_down,
    wrong_key,
)
from kvtier.serve.server.service import Service

logger = logging.getLogger(__name__)

ENDPOINTS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/completions/cost": "cost",
    "/v1/chat/completions/cost": "cost",
    "/v1/models": "models",
    "/health": "health",
    "/metrics": "metrics",
    LIVE_PATH: "live",
}
"""Labels of paths in the metrics; every other path is "other"."""

REQUEST_ID = b"x-request-id"
_KEPT_ID = re.compile(rb"[A-Za-z0-9._:;=@/+~-]{1,128}")
"""Ids of clients that are kept: those of proxies, UUIDs, trace ids, base64."""

ID_PREFIXES = {"completions": "cmpl", "chat": "chatcmpl"}
CONTROL_PATHS = PATHS | {"/status", "/import"}
"""Paths that need the control key."""
OPEN_PATHS = frozenset({"/health"})
"""Paths that need no API key. The live page's files need none either: they are public, and the page
asks for the key before it shows data."""


class ApiKeys:
    """Verifies API keys in constant time.

    Digests of equal length are compared, in full, with every key. So the time reveals neither how
    much of a key was right, nor its length, nor which key it was.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        # Random per process, so that digests cannot be precomputed.
        self._secret = os.urandom(32)
        self._digests = tuple(self._digest(key.encode()) for key in keys)

    def has(self, sent: bytes) -> bool:
        """Whether ``sent`` is one of the keys."""
        digest = self._digest(sent)
        is_known = False
        for each in self._digests:
            is_known |= hmac.compare_digest(digest, each)
        return is_known

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, sha256)


class Observe:
    """Outermost middleware: identifies, counts and times requests, and answers internal errors."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint = ENDPOINTS.get(scope["path"], "other")
        client_id = _client_id(scope)
        # Of the answer and in logs. As in vLLM, it contains the client's id.
        request_id = f"{ID_PREFIXES.get(endpoint, 'req')}-{client_id or uuid.uuid4().hex}"
        header_id = client_id or request_id
        began = time.perf_counter()
        # status: overrides the status line that was sent.
        state = {
            "request_id": request_id,
            "header_id": header_id,
            "began": began,
            "status": None,
        }
        scope["state"] = {**scope.get("state", {}), **state}
        sent: list[int] = []

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent.append(message["status"])
                message["headers"] = [
                    *message.get("headers", []),
                    (REQUEST_ID, header_id.encode()),
                ]
            await send(message)

        self._service.enter()
        try:
            await self._app(scope, receive, send_named)
        except asyncio.CancelledError:
            # The server shuts down, and this client does not read its answer.
            if not self._service.is_closing:
                raise
            logger.warning("given up id=%s", request_id)
        except Exception as error:
            _log_failure(request_id, error)
            if not sent:
                await internal_error(request_id).response()(scope, receive, send_named)
        finally:
            self._service.leave()
            status = scope["state"]["status"] or (sent[0] if sent else 499)
            self._service.metrics.request(endpoint, status)
            logger.debug(
                "request id=%s endpoint=%s method=%s status=%d seconds=%.4f",
                request_id,
                endpoint,
                scope["method"],
                status,
                time.perf_counter() - began,
            )


class RequestGate:
    """Refuses requests over a limit, without a key, or after the shutdown began.

    Puts the body into the request's state.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        config = service.config
        self._keys = ApiKeys(config.api_keys) if config.api_keys else None
        self._control = None if config.control_key is None else ApiKeys([config.control_key])
        self._open_paths = OPEN_PATHS | ({"/metrics"} if config.metrics_open else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._admit(scope, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:
            return
        scope["state"]["body"] = body
        try:
            await self._app(scope, receive, send)
        finally:
            body.release()

    async def _admit(self, scope: Scope, receive: Receive) -> Body | None:
        """Return the body of an admitted request; None if its client has disconnected.

        The key of the control is trusted: the body of its request is left for the route to read.
        """
        bodies, path = self._service.bodies, scope["path"]
        is_control = self._control is not None and path in CONTROL_PATHS
        try:
            if path not in MONITOR_PATHS and not self._service.doorman.make_room():
                raise crowded("There are too many connections")
            if is_control:
                _check_bearer(scope, self._control, "control")
            elif path not in self._open_paths and name_of(path) is None:
                _check_bearer(scope, self._keys)
            self._check_open()
            _check_encoding(scope)
        except ApiError as error:
            await bodies.refuse(scope, receive, error)
            raise
        if is_control:
            return Body(b"")
        body = await bodies.read(scope, receive)
        if body is not None and self._service.is_closing:
            body.release()
            self._check_open()
        return body

    def _check_open(self) -> None:
        if self._service.is_closing:
            raise shutting_down()


def _client_id(scope: Scope) -> str:
    """Return the id that the client gave its request; "" for none, or one that is not kept."""
    sent: bytes = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
    return sent.decode() if _KEPT_ID.fullmatch(sent) else ""


def _check_encoding(scope: Scope) -> None:
    """Raise ``ApiError`` for a body that is compressed."""
    for name, value in scope["headers"]:
        encoding = value.strip().lower()
        if name == b"content-encoding" and encoding not in (b"", b"identity"):
            raise body_compressed(encoding.decode("latin-1"))


def _check_bearer(scope: Scope, keys: ApiKeys | None, kind: str = "API") -> None:
    """Raise ``ApiError`` if there are keys, and the request has none of them."""
    if keys is None:
        return
    header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, sent = header.partition(b" ")
    if scheme.lower() != b"bearer" or not keys.has(sent.strip()):
        raise wrong_key(bool(sent), kind)


def _log_failure(request_id: str, error: Exception) -> None:
    """Log where a request failed, without the error's text, which may quote the request."""
    where = "".join(traceback.format_tb(error.__traceback__))
    kind = type(error).__name__
    logger.error("request failed id=%s error=%s", request_id, kind, extra={"detail": where})
