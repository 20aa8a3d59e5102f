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
from kvtier.control.page import page_router
from kvtier.errors import CacheError
from kvtier.node.control import (
    ControlError,
    Deleted,
    LoopCalls,
    NodeControl,
    NodeState,
    PinnedBlocks,
    PromptPlaces,
    TenantState,
)
from kvtier.node.metrics import NodeMetrics
from kvtier.node.node import CacheNode


class PromptBody(BaseModel):
    """Blocks of a prompt in their order, by their keys in hexadecimal."""

    room: str = ""
    keys: list[str]
    timeout_s: float = 10.0


class PinBody(PromptBody):
    """Blocks to be kept in memory for some seconds."""

    seconds: float


class UnpinBody(BaseModel):
    """A pin to be ended."""

    room: str = ""
    number: int


class DeleteBody(BaseModel):
    """Blocks to be deleted: those of ``keys``, or all of a room or a tenant."""

    room: str = ""
    tenant: str = ""
    keys: list[str] | None = None
    timeout_s: float = 60.0


class ClearBody(BaseModel):
    """Rooms to be emptied: one, or all."""

    room: str = ""
    memory_only: bool = False
    timeout_s: float = 60.0


class QuotaBody(BaseModel):
    """Bounds of a tenant's host memory and of its slabs, as sizes. No ceiling: None.

    What has neither floor nor ceiling is left as it is.
    """

    tenant: str
    floor: str | None = None
    ceiling: str | None = None
    disk_floor: str | None = None
    disk_ceiling: str | None = None


def reading_app(node: CacheNode, control: NodeControl, call: LoopCalls) -> FastAPI:
    """Return the application with the routes that change nothing."""
    app = FastAPI(title="kvtier node", version=__version__, docs_url=None, redoc_url=None)

    @app.exception_handler(CacheError)
    async def refuse(request: Request, error: CacheError) -> JSONResponse:
        is_unknown = isinstance(error, ControlError) and error.is_unknown
        return JSONResponse({"error": str(error)}, 404 if is_unknown else 400)

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
    return app


def control_app(node: CacheNode, control: NodeControl, call: LoopCalls) -> FastAPI:
    """Return the application with all routes."""
    app = reading_app(node, control, call)

    @app.post("/lookup")
    async def lookup(body: PromptBody) -> PromptPlaces:
        """Find the blocks of a prompt."""
        return await call(lambda: control.lookup(body.room, body.keys, body.timeout_s))

    @app.post("/prefetch")
    async def prefetch(body: PromptBody) -> PromptPlaces:
        """Read the blocks of a prompt from storage into memory."""
        return await call(lambda: control.prefetch(body.room, body.keys, body.timeout_s))

    @app.post("/pin")
    async def pin(body: PinBody) -> PinnedBlocks:
        """Keep the blocks of a prompt in memory for a time."""
        return await call(lambda: control.pin(body.room, body.keys, body.seconds, body.timeout_s))

    @app.post("/unpin")
    async def unpin(body: UnpinBody) -> None:
        """End a pin before its time."""
        await call(lambda: control.unpin(body.room, body.number))

    @app.post("/delete")
    async def delete(body: DeleteBody) -> Deleted:
        """Delete blocks from every tier. It is complete when the answer says so."""
        keys = body.keys
        if keys is None:
            return await call(lambda: control.delete_rooms(body.room, body.tenant, body.timeout_s))
        if body.tenant:
            raise ControlError("keys belong to a room; name it, and no tenant")
        return await call(lambda: control.delete_keys(body.room, keys, body.timeout_s))

    @app.post("/clear")
    async def clear(body: ClearBody) -> Deleted:
        """Delete the blocks of one room, or of all; or only evict them from memory."""
        return await call(lambda: control.clear(body.room, body.memory_only, body.timeout_s))

    @app.post("/quota")
    async def set_quota(body: QuotaBody) -> TenantState:
        """Change a tenant's quota until the node ends."""
        host = _bounds(body.floor, body.ceiling)
        disk = _bounds(body.disk_floor, body.disk_ceiling)
        return await call(lambda: control.set_quota(body.tenant, host, disk))

    return app


def _bounds(floor: str | None, ceiling: str | None) -> tuple[str, str | None] | None:
    return None if floor is None and ceiling is None else (floor or "0", ceiling)
