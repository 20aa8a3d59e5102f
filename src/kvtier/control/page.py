"""Routes of the live page and its data."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable

from fastapi import APIRouter
from prometheus_client import Metric
from starlette.responses import Response

from kvtier.observe.live.files import FOLDER, HEADERS, LIVE_PATH, PAGE, TYPES, content_of
from kvtier.observe.live.history import History
from kvtier.observe.live.reading import Reading
from kvtier.observe.live.scrape import LEAST_PAUSE_S

ReadMetrics = Callable[[], Awaitable[Iterable[Metric]]]


class LiveView:
    """Current picture of a server; belongs to the thread of its HTTP server's event loop.

    The metrics are read at most once per ``LEAST_PAUSE_S`` for all viewers, and not at all without
    viewers.
    """

    def __init__(self, read: ReadMetrics) -> None:
        self._read = read
        self._history = History()
        self._looked_s = float("-inf")
        self._content = b""

    async def content(self) -> bytes:
        """Return the picture as JSON; see ``live.Picture``."""
        if time.monotonic() - self._looked_s >= LEAST_PAUSE_S or not self._content:
            self._looked_s = time.monotonic()  # concurrent callers get the previous picture
            self._history.add(Reading.of(await self._read(), time.monotonic()))
            self._content = json.dumps(self._history.picture().as_json()).encode()
        return self._content


def page_router(read: ReadMetrics) -> APIRouter:
    """Return the router of ``/``, its files, and ``LIVE_PATH``. read: returns the metrics."""
    router = APIRouter(include_in_schema=False)
    view = LiveView(read)

    @router.get("/")
    async def page() -> Response:
        return _file(PAGE)

    @router.get(FOLDER + "{name}")
    async def file(name: str) -> Response:
        return _file(name) if name in TYPES else Response(status_code=404, headers=dict(HEADERS))

    @router.get(LIVE_PATH)
    async def picture() -> Response:
        return Response(await view.content(), 200, dict(HEADERS), "application/json")

    return router


def _file(name: str) -> Response:
    return Response(content_of(name), 200, dict(HEADERS), TYPES[name])
