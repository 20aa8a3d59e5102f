"""``kvtier serve``: its options, and the configurations made from them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from kvtier.core.config import CacheConfig
from kvtier.core.types import LogFormat
from kvtier.serve.engine.config import CACHE, MODEL, SERVER, EngineConfig
from kvtier.serve.server.config import ServerConfig
from kvtier.tools.cli.api_keys import take_control_key, take_key_source, take_keys
from kvtier.tools.cli.failure import starting
from kvtier.tools.cli.settings_options import settings_options


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@settings_options(
    CacheConfig,
    [
        "host_capacity",
        "disk_path",
        "disk_capacity",
        "disk_durability",
        "disk_verify",
        "disk_direct",
        "disk_bytes_per_day",
        "disk_bytes_per_s",
        "storage",
        "storage_capacity",
        "warm_start",
        "node",
        "node_tenant",
        "engine_name",
        "codec",
        "encryption_key",
        "prefetch_policy",
        "prefetch_timeout_s",
        "client_hints",
        "write_policy",
        "eviction_policy",
    ],
    CACHE,
    reads_environment=True,
    host_capacity="2x",
)
@settings_options(EngineConfig, panel="Model", into="engine")
@settings_options(ServerConfig, panel=SERVER, into="server")
def serve(
    model: Annotated[str, typer.Argument(help=MODEL)] = "kvtier-tiny",
    log_level: Annotated[
        LogLevel, typer.Option(help="Level of the log on stderr.", rich_help_panel=SERVER)
    ] = LogLevel.INFO,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(
            help="Format of the log: text, or json with one object per line. KVTIER_LOG_FORMAT in "
            "the environment sets the same.",
            rich_help_panel=SERVER,
            show_default="text",
        ),
    ] = None,
    *,
    settings: Mapping[str, Any],
    engine: Mapping[str, Any],
    server: Mapping[str, Any],
) -> None:
    """Serve a model with an OpenAI-compatible API."""
    with starting("serve") as on_ready:
        from kvtier.observe.logs import format_of, log_to_stderr
        from kvtier.tools.cli.serving import serve_until_ended

        log_to_stderr(log_level, format_of(log_format))
        key = take_key_source(settings.get("encryption_key", ""))
        server_config = ServerConfig(
            **{
                **server,
                "api_key": take_keys(server.get("api_key")),
                "control_key": take_control_key(server.get("control_key")),
                "max_choices": max(1, min(64, engine.get("max_queue", 64))),
            }
        )
        cache = CacheConfig(**{**settings, "encryption_key": key})
        engine_config = EngineConfig(model=model, cache=cache, **engine)
        serve_until_ended(engine_config, server_config, on_ready)
