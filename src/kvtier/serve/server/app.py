"""The API: its paths and middleware."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from kvtier import __version__
from kvtier.control.page import LiveView, page_router
from kvtier.control.routes import HeadAsGet
from kvtier.serve.server.chat import chat_router
from kvtier.serve.server.completions import completions_router
from kvtier.serve.server.control import server_control_router
from kvtier.serve.server.errors import add_error_handlers
from kvtier.serve.server.gate import Observe, RequestGate
from kvtier.serve.server.metrics import CacheMetrics
from kvtier.serve.server.responses import HealthAnswer, Model, ModelList
from kvtier.serve.server.schemas import components
from kvtier.serve.server.service import Service


def make_app(service: Service) -> FastAPI:
    """Return the ASGI application that serves ``service``; ``state.live`` is its ``LiveView``."""
    app = FastAPI(title="kvtier", version=__version__, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    app.include_router(completions_router(service))
    app.include_router(chat_router(service))
    nothing: list[Metric] = []
    cache_metrics = CacheMetrics(service.engine, generate_latest, b"")
    cache_families = CacheMetrics(service.engine, _collect, nothing)

    async def families() -> list[Metric]:
        return [*service.metrics.registry.collect(), *await cache_families.read()]

    app.state.live = LiveView(families)
    app.include_router(page_router(app.state.live))
    if service.config.control_key is not None:
        app.include_router(server_control_router(service))

    def model() -> Model:
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "kvtier",
            "max_model_len": service.engine.info.max_model_tokens,
        }

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        """Return the one model that is served."""
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Model:
        service.check_model(name)
        return model()

    @app.get("/health")
    async def health() -> HealthAnswer:
        """Return that the server is ready. During shutdown this is an error, as for all paths."""
        engine = service.engine
        return {
            "status": "ok",
            "model": service.model_name,
            "running": engine.num_running,
            "waiting": engine.num_waiting,
        }

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the server's metrics, then the cache's."""
        text = service.metrics.text() + await cache_metrics.read()
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def describe() -> dict[str, Any]:
        """Return FastAPI's OpenAPI schema, with the bodies that it does not parse."""
        if app.openapi_schema is None:
            described = get_openapi(title=app.title, version=app.version, routes=app.routes)
            described.setdefault("components", {}).setdefault("schemas", {}).update(components())
            app.openapi_schema = described
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]
    # The last one added is the outermost.
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestGate, service=service)
    app.add_middleware(Observe, service=service)
    if service.config.cors_origin:
        # A browser asks before its request, without a key, and reads no error without a header.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.config.cors_origin,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    return app


def _collect(registry: CollectorRegistry) -> list[Metric]:
    return list(registry.collect())
