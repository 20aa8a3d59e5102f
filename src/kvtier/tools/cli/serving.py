"""Run a server with its engine, from their configurations until a signal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import typer

from kvtier import __version__
from kvtier.cache.assembly import policy_maker
from kvtier.control.doorman import raise_descriptor_limit, room_for_connections
from kvtier.core.config import parse_size
from kvtier.core.system.signals import ended_by_signals
from kvtier.core.system.user_paths import user_path
from kvtier.observe.block_events import BlockLog
from kvtier.observe.publisher import Publisher, is_local
from kvtier.observe.recording import check_recording, salt_from_environment
from kvtier.observe.traces import open_traces
from kvtier.serve.engine import EngineConfig
from kvtier.serve.engine.model_names import find_local
from kvtier.serve.server.config import ServerConfig
from kvtier.serve.server.listener import bind, is_loopback
from kvtier.tiers.remote.pack_files import check_pack_files
from kvtier.tiers.remote.warm_start import warm_start_of
from kvtier.tiers.row import check_tiers
from kvtier.tools.cli.api_keys import KEY_VARIABLE

logger = logging.getLogger(__name__)


def serve_until_ended(
    engine_config: EngineConfig, server_config: ServerConfig, on_ready: Callable[[], None]
) -> None:
    """Serve until a signal arrives. Settings are checked before torch and the model are loaded.

    on_ready: called as soon as clients can connect.
    """
    raise_descriptor_limit()
    room_for_connections()
    _check(engine_config, server_config)
    with ended_by_signals() as ending, ExitStack() as opened:
        bound = bind(server_config.host, server_config.port)
        listeners = [opened.enter_context(listener) for listener in bound]
        if server_config.ssl_certfile is not None:
            from kvtier.serve.server.tls import open_certificate

            open_certificate(server_config)
        _warn(engine_config, server_config, is_open=not all(map(is_loopback, listeners)))
        model, port = server_config.served_model_name, bound[0].getsockname()[1]
        cache = engine_config.cache.titled(model or engine_config.model, port)
        engine_config = replace(engine_config, cache=cache)
        logger.info("loading model name=%s", engine_config.model)
        logger.info("importing torch and transformers")

        from kvtier.serve.engine import Engine
        from kvtier.serve.server.run import HttpServer

        with Engine(engine_config) as engine:

            def tell(url: str) -> None:
                on_ready()
                name = server_config.served_model_name or engine.info.model_name
                typer.echo(f"kvtier serves {name} on {engine.info.device} at {url}")

            if not ending.is_asked:
                HttpServer(engine, server_config, listeners).run(tell, handle_signals=True)


def check_engine(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for settings of an engine before its model is loaded."""
    find_local(config.model, config.revision)
    policy_maker(config.cache.eviction_policy)
    check_tiers(config.cache, parse_size(config.device_capacity, "device_capacity"))
    check_pack_files(config.cache.stores)
    warm_start_of(config.cache.stores, config.cache.warm_start)


def _check(config: EngineConfig, server_config: ServerConfig) -> None:
    """Raise ``ConfigError`` for all settings that can be refused before the model is loaded."""
    check_engine(config)
    if config.events:
        Publisher(BlockLog(), config.events, config.events_replay).close()
    if server_config.record:
        path = user_path(server_config.record)
        max_bytes = parse_size(server_config.record_max_bytes, "record_max_bytes")
        check_recording(path, max_bytes)
        salt_from_environment()
    if server_config.traces:
        open_traces(__version__).close()


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
    for warning in warnings:
        typer.echo(f"kvtier serve: warning: {warning}", err=True)
