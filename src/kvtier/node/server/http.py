"""HTTP routes of a node's control API.

All routes are served on a Unix socket, whose permissions decide who may use them. On a TCP port of
the loopback address only routes that change nothing are served: every user of the machine can reach
that port, and so can every page in a browser on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier import __version__
from kvtier.control.page import LiveView, page_router
from kvtier.control.routes import (
    ControlBody,
    ControlRoute,
    HeadAsGet,
    PromptBody,
    control_router,
)
from kvtier.node.server.control import NodeControl, NodeState, TenantState
from kvtier.node.server.metrics import NodeMetrics
from kvtier.node.server.node import CacheNode
from kvtier.plan import PromptCost

MAX_BODY_BYTES = 8 << 20
"""Longest body of a request: the keys of 65,536 blocks, of 32 bytes each, take five eighths."""
DISCARDED_BYTES = 64 << 20
"""So much of a longer one is read, since a client that still sends does not see the answer."""
BODY_S = 30.0
"""Longest time in which a body has to arrive."""


class QuotaBody(ControlBody):
    """New bounds of a tenant's host memory and of its slabs, as sizes. What is None stays as it is.

    ceiling, disk_ceiling: "none" for no ceiling.
    """

    tenant: str
    floor: str | None = None
    ceiling: str | None = None
    disk_floor: str | None = None
    disk_ceiling: str | None = None


class ShortBodies:
    """Middleware that reads the body of a request, with limits on its length and time."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, num_bytes, is_whole = bytearray(), 0, False
        refusal: Response | None = None
        try:
            async with asyncio.timeout(BODY_S):
                while not is_whole and num_bytes <= DISCARDED_BYTES:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    part: bytes = message.get("body", b"")
                    is_whole = not message.get("more_body", False)
                    num_bytes += len(part)
                    if num_bytes <= MAX_BODY_BYTES:
                        body += part
            if num_bytes > MAX_BODY_BYTES:
                refusal = _refused(f"the body has more than {MAX_BODY_BYTES} bytes", 413)
        except TimeoutError:
            refusal = _refused(f"the body did not arrive within {BODY_S:.0f} s", 408)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": bytes(body)}]

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, again, send)


def _refused(reason: str, status: int) -> Response:
    """Return the answer to a request whose body is not read to its end."""
    return JSONResponse({"error": reason}, status, {"Connection": "close"})


def reading_app(node: CacheNode, control: NodeControl) -> FastAPI:
    """Return the application with the routes that change nothing.

    ``state.live`` is its ``LiveView``.
    """
    app = FastAPI(title="kvtier node", version=__version__, docs_url=None, redoc_url=None)
    app.router.route_class = ControlRoute

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return "ok" if the node's own thread answers."""
        await control.tenants()
        return {"status": "ok"}

    @app.get("/status")
    async def status() -> NodeState:
        """Return the state of the node, its engines, tenants and partitions."""
        return await control.status()

    @app.get("/quota")
    async def quotas() -> dict[str, TenantState]:
        """Return quota and use of each tenant."""
        return await control.tenants()

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics of the node and of all partitions."""
        return Response((await read()).text(), media_type=CONTENT_TYPE_LATEST)

    async def read() -> NodeMetrics:
        state, lookups = await control.status(), await control.lookup_times()
        partitions: dict[tuple[str, str], CollectorRegistry] = {
            (partition.key.tenant, partition.key.name): partition.cache.metrics.registry
            for partition in list(node.partitions)
        }
        return NodeMetrics(state, lookups, partitions)

    async def collect() -> Iterable[Metric]:
        return (await read()).collect()

    app.state.live = LiveView(collect)
    app.include_router(page_router(app.state.live))
    app.add_middleware(HeadAsGet)
    app.add_middleware(ShortBodies)
    return app


def control_app(node: CacheNode, control: NodeControl) -> FastAPI:
    """Return the application with all routes."""
    app = reading_app(node, control)

    app.include_router(control_router(control))

    @app.post("/cost")
    async def cost(body: PromptBody) -> dict[str, PromptCost]:
        """Return what a prompt of token ids would cost each engine, by its name.

        ``tenant`` is the ``cache_salt`` of its requests.
        """
        return await control.cost(body.named())

    @app.post("/quota")
    async def set_quota(body: QuotaBody) -> TenantState:
        """Change a tenant's quota until the node ends."""
        host, disk = (body.floor, body.ceiling), (body.disk_floor, body.disk_ceiling)
        return await control.set_quota(body.tenant, host, disk)

    return app
