"""HTTP routes of a node's control API.

All routes are served on a Unix socket, whose permissions say who may use them. On a TCP port of the
loopback address only those that change nothing are served, since every user of the machine, and
every page in a browser on it, can reach that.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric
from pydantic import BaseModel

from kvtier import __version__
from kvtier.control.contract import (
    CacheControl,
    Deleted,
    PinnedBlocks,
    PromptName,
    PromptPlaces,
)
from kvtier.control.head import HeadAsGet
from kvtier.control.page import page_router
from kvtier.control.routes import control_router, refusal
from kvtier.errors import CacheError
from kvtier.node.control import LoopCalls, NodeControl, NodeState, TenantState
from kvtier.node.metrics import NodeMetrics
from kvtier.node.node import CacheNode


class QuotaBody(BaseModel):
    """Bounds of a tenant's host memory and of its slabs, as sizes. No ceiling: None.

    What has neither floor nor ceiling is left as it is.
    """

    tenant: str
    floor: str | None = None
    ceiling: str | None = None
    disk_floor: str | None = None
    disk_ceiling: str | None = None


class OnLoop(CacheControl):
    """Control of a node, on the thread of the node's event loop."""

    def __init__(self, control: NodeControl, call: LoopCalls) -> None:
        self._control = control
        self._call = call

    async def lookup(self, prompt: PromptName, timeout_s: float) -> PromptPlaces:
        return await self._call(lambda: self._control.lookup(prompt, timeout_s))

    async def prefetch(self, prompt: PromptName, timeout_s: float) -> PromptPlaces:
        return await self._call(lambda: self._control.prefetch(prompt, timeout_s))

    async def pin(self, prompt: PromptName, seconds: float, timeout_s: float) -> PinnedBlocks:
        return await self._call(lambda: self._control.pin(prompt, seconds, timeout_s))

    async def unpin(self, room: str, number: int) -> None:
        await self._call(lambda: self._control.unpin(room, number))

    async def delete(self, prompt: PromptName, timeout_s: float) -> Deleted:
        return await self._call(lambda: self._control.delete(prompt, timeout_s))

    async def delete_rooms(self, room: str, tenant: str, timeout_s: float) -> Deleted:
        return await self._call(lambda: self._control.delete_rooms(room, tenant, timeout_s))

    async def clear(self, room: str, memory_only: bool, timeout_s: float) -> Deleted:
        return await self._call(lambda: self._control.clear(room, memory_only, timeout_s))


def reading_app(node: CacheNode, control: NodeControl, call: LoopCalls) -> FastAPI:
    """Return the application with the routes that change nothing."""
    app = FastAPI(title="kvtier node", version=__version__, docs_url=None, redoc_url=None)

    @app.exception_handler(CacheError)
    async def refuse(request: Request, error: CacheError) -> JSONResponse:
        return refusal(error)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return "ok" if the node's own thread answers."""
        await call(control.tenants)
        return {"status": "ok"}

    @app.get("/status")
    async def status() -> NodeState:
        """Return the state of the node, its engines, tenants and rooms."""
        return await call(control.status)

    @app.get("/quota")
    async def quotas() -> dict[str, TenantState]:
        """Return quota and use of each tenant."""
        return await call(control.tenants)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics of the node and of all rooms."""
        return Response((await read()).text(), media_type=CONTENT_TYPE_LATEST)

    async def read() -> NodeMetrics:
        state, lookups = await call(control.status), await call(control.lookup_times)
        rooms: dict[tuple[str, str], CollectorRegistry] = {
            (room.key.tenant, room.key.name): room.metrics.registry for room in list(node.rooms)
        }
        return NodeMetrics(state, lookups, rooms)

    async def collect() -> Iterable[Metric]:
        return (await read()).collect()

    app.include_router(page_router(collect))
    app.add_middleware(HeadAsGet)
    return app


def control_app(node: CacheNode, control: NodeControl, call: LoopCalls) -> FastAPI:
    """Return the application with all routes."""
    app = reading_app(node, control, call)

    app.include_router(control_router(OnLoop(control, call)))

    @app.post("/quota")
    async def set_quota(body: QuotaBody) -> TenantState:
        """Change a tenant's quota until the node ends."""
        host = _bounds(body.floor, body.ceiling)
        disk = _bounds(body.disk_floor, body.disk_ceiling)
        return await call(lambda: control.set_quota(body.tenant, host, disk))

    return app


def _bounds(floor: str | None, ceiling: str | None) -> tuple[str, str | None] | None:
    return None if floor is None and ceiling is None else (floor or "0", ceiling)
