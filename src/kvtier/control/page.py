"""Routes of the live page and its data."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import Metric
from starlette.responses import Response

from kvtier.core.errors import CacheError
from kvtier.observe.live.charts import EVERY_S
from kvtier.observe.live.files import (
    FOLDER,
    HEADERS,
    HOUR_QUERY,
    LIVE_PATH,
    PAGE,
    TYPES,
    content_of,
)
from kvtier.observe.live.history import History
from kvtier.observe.live.reading import Reading
from kvtier.observe.live.scrape import LEAST_PAUSE_S

logger = logging.getLogger(__name__)

ReadMetrics = Callable[[], Awaitable[Iterable[Metric]]]


class LiveView:
    """Current picture of a server; belongs to the thread of its HTTP server's event loop.

    The metrics are read at most once per ``LEAST_PAUSE_S`` for all viewers, and once per
    ``EVERY_S`` while ``watch`` runs.
    """

    def __init__(self, read: ReadMetrics) -> None:
        self._read = read
        self._history = History()
        self._viewed_s = float("-inf")
        self._picture: dict[str, Any] = {}

    async def watch(self) -> None:
        """Read the metrics for the charts of the last hour, until cancelled."""
        while True:
            try:
                await self._look()
            except CacheError as error:
                logger.debug("the live page's metrics can't be read: %s", error)
            await asyncio.sleep(EVERY_S)

    async def content(self, has_hour: bool) -> bytes:
        """Return the picture as JSON, see ``History.look``; on request with the last hour."""
        if time.monotonic() - self._viewed_s >= LEAST_PAUSE_S or not self._picture:
            self._viewed_s = time.monotonic()  # concurrent callers get the previous picture
            await self._look()
        hour = {"hour": self._history.hour(time.monotonic())} if has_hour else {}
        return json.dumps({**self._picture, **hour}).encode()

    async def _look(self) -> None:
        self._picture = self._history.look(Reading.of(await self._read(), time.monotonic()))


def page_router(view: LiveView) -> APIRouter:
    """Return the router of ``/``, its files, and ``LIVE_PATH``."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page() -> Response:
        return _file(PAGE)

    @router.get(FOLDER + "{name}")
    async def file(name: str) -> Response:
        return _file(name) if name in TYPES else Response(status_code=404, headers=dict(HEADERS))

    @router.get(LIVE_PATH)
    async def picture(request: Request) -> Response:
        content = await view.content(request.url.query == HOUR_QUERY)
        return Response(content, 200, dict(HEADERS), "application/json")

    return router


def _file(name: str) -> Response:
    return Response(content_of(name), 200, dict(HEADERS), TYPES[name])
