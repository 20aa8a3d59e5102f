"""A server with its engine, from its configs until it ends. Needs what the engine needs."""

from __future__ import annotations

import typer

from kvtier import server
from kvtier.cli.api_keys import KEY_VARIABLE
from kvtier.cli.failure import fail
from kvtier.engine import Engine, EngineConfig
from kvtier.errors import CacheError, ConfigError
from kvtier.server import ServerConfig
from kvtier.telemetry.publisher import is_local


def serve_until_ended(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """Serve until a signal comes. What can't be used is told before the model is loaded."""
    try:
        server.open_certificate(server_config)
        listener = server.bind(server_config.host, server_config.port)
    except CacheError as error:
        fail("serve", error)
    if not server_config.api_keys and not server.is_loopback(listener):
        _warn(
            f"listening on {server_config.host} without an API key: whoever reaches this machine "
            f"can use it; set {KEY_VARIABLE}"
        )
    if engine_config.events and not is_local(engine_config.events):
        _warn(
            f"whoever reaches {engine_config.events} reads the token ids of all prompts; publish "
            "on a network that only routers are in"
        )

    with listener:
        try:
            engine = Engine(engine_config)
        except CacheError as error:
            fail("serve", error)

        def tell(url: str) -> None:
            name = server_config.served_model_name or engine.info.model_name
            typer.echo(f"kvtier serves {name} on {engine.info.device} at {url}")

        with engine:
            try:
                server.HttpServer(engine, server_config, listener).run(tell, handle_signals=True)
            except ConfigError as error:
                fail("serve", error)


def _warn(of: str) -> None:
    typer.echo(f"kvtier serve: warning: {of}", err=True)
