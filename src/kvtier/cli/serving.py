"""Run a server with its engine, from their configurations until a signal."""

from __future__ import annotations

import logging
from collections.abc import Callable

import typer

from kvtier import server
from kvtier.cli.api_keys import KEY_VARIABLE
from kvtier.engine import EngineConfig
from kvtier.engine.model_names import find_model
from kvtier.server import ServerConfig
from kvtier.system.plugins import find_plugin
from kvtier.telemetry.publisher import is_local
from kvtier.tiers.row import plugins_of, storage_names

logger = logging.getLogger(__name__)


def serve_until_ended(
    engine_config: EngineConfig, server_config: ServerConfig, on_ready: Callable[[], None]
) -> None:
    """Serve until a signal arrives. Settings are checked before torch and the model are loaded.

    on_ready: called as soon as clients can connect.
    """
    server.raise_descriptor_limit()
    server.room_for_connections()
    _check(engine_config)
    with server.bind(server_config.host, server_config.port) as listener:
        if server_config.ssl_certfile is not None:
            server.open_certificate(server_config)
        _warn(engine_config, server_config, is_open=not server.is_loopback(listener))
        logger.info("loading model name=%s", engine_config.model)

        from kvtier.engine import Engine

        with Engine(engine_config) as engine:

            def tell(url: str) -> None:
                on_ready()
                name = server_config.served_model_name or engine.info.model_name
                typer.echo(f"kvtier serves {name} on {engine.info.device} at {url}")

            server.HttpServer(engine, server_config, listener).run(tell, handle_signals=True)


def _check(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for unknown names of models, policies and plug-ins."""
    find_model(config.model)
    find_plugin("policies", config.cache.eviction_policy)
    storage_names(config.cache.storage, bool(config.cache.disk_path))
    for plugin in plugins_of(config.cache.storage):
        find_plugin("tiers", plugin)


def _warn(engine_config: EngineConfig, server_config: ServerConfig, is_open: bool) -> None:
    warnings = []
    if is_open and not server_config.api_keys:
        warnings.append(
            f"listening on {server_config.host} without an API key: anyone who can reach it "
            f"can use it; set {KEY_VARIABLE}"
        )
    if engine_config.events and not is_local(engine_config.events):
        warnings.append(
            f"anyone who can reach {engine_config.events} reads the token ids of all prompts; "
            "publish on a network that only routers are in"
        )
    for each in warnings:
        typer.echo(f"kvtier serve: warning: {each}", err=True)
