"""Server-sent events, and detection of disconnected clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvtier.serve.server.errors import ClientGone

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
"""The last event of every stream."""


def encode_json(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def encode_event(value: Mapping[str, object]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


async def unless_gone(work: Coroutine[object, object, T], receive: Receive) -> T:
    """Return the result of ``work``. If the client disconnects first, cancel it: ``ClientGone``.

    receive: of a request whose body has been read.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, watch):
            each.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of server-sent events.

    events: each already encoded.
    on_end: always called at the end, with whether the client got everything.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[bool], None]) -> None:
        self._events = events
        self._on_end = on_end
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type=self.media_type,
        )
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_complete = False
        try:
            await unless_gone(self._send(send), receive)
            is_complete = True
        except ClientGone:
            scope["state"]["status"] = 499
        finally:
            self._on_end(is_complete)

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
