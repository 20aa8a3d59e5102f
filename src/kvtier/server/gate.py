"""What every request passes before the API sees it: an identity, a key, an open door, a bound."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import traceback
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.server.errors import ApiError, body_too_long, internal_error, shutting_down, wrong_key
from kvtier.server.service import Service

logger = logging.getLogger(__name__)

ENDPOINTS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/models": "models",
    "/health": "health",
    "/metrics": "metrics",
}
"""Labels in the metrics; every other path is "other"."""

ID_PREFIXES = {"completions": "cmpl", "chat": "chatcmpl"}
OPEN_PATHS = frozenset({"/health"})
"""Need no API key."""

DISCARDED_BYTES = 64 << 20
DISCARDED_S = 5.0
"""A body that is too long is read on and thrown away within these bounds, for a client that is
still sending does not see the answer."""


class Observe:
    """Outermost: names, counts and times requests, and answers where the server itself failed."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint = ENDPOINTS.get(scope["path"], "other")
        request_id = f"{ID_PREFIXES.get(endpoint, 'req')}-{uuid.uuid4().hex}"
        began = time.perf_counter()
        # status: set by whoever knows better than the status line that was sent.
        state = {"request_id": request_id, "began": began, "status": None}
        scope["state"] = {**scope.get("state", {}), **state}
        sent: list[int] = []

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent.append(message["status"])
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        self._service.enter()
        try:
            await self._app(scope, receive, send_named)
        except asyncio.CancelledError:
            # The server must go, and this client does not read what it asked for.
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


class Gate:
    """Refuses wrong keys, new requests while the server shuts down, and bodies without end."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        key = service.config.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            self._check_open()
            body = await self._read_body(scope, receive)
            self._check_open()
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    def _check_open(self) -> None:
        if self._service.is_closing:
            raise shutting_down()

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, sent = header.partition(b" ")
        # Both are compared in full, whatever the difference: the time tells nothing.
        is_equal = hmac.compare_digest(sent.strip(), self._key)
        if scheme.lower() != b"bearer" or not is_equal:
            raise wrong_key(sent=bool(sent))

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body, at most as long as allowed. None: the client is gone."""
        limit = self._service.config.max_body_bytes
        parts: list[bytes] = []
        num_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            more = message.get("more_body", False)
            if num_bytes > limit:
                await _discard(receive, more)
                raise body_too_long(limit)
        return b"".join(parts)


async def _discard(receive: Receive, more: bool) -> None:
    num_bytes = 0
    try:
        async with asyncio.timeout(DISCARDED_S):
            while more and num_bytes < DISCARDED_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                more = message.get("more_body", False)
    except TimeoutError:
        pass


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body that was read already, then what comes after it."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


def _log_failure(request_id: str, error: Exception) -> None:
    """Where it failed, without the error's text: that may quote the request."""
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request failed id=%s error=%s\n%s", request_id, type(error).__name__, where)
