"""``kvtier serve``: its options, and the configurations made from them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from kvtier.core.config import BLOCK_SIZE, CHUNK_TOKENS, CacheConfig, parse_size
from kvtier.core.types import LogFormat
from kvtier.tools.cli.api_keys import (
    CONTROL_KEY_VARIABLE,
    KEY_VARIABLE,
    take_control_key,
    take_key_source,
    take_keys,
)
from kvtier.tools.cli.failure import starting
from kvtier.tools.cli.settings_options import settings_options

_SERVER, _MODEL, _CACHE = "Server", "Model", "Cache"


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
        "storage",
        "storage_capacity",
        "node",
        "node_tenant",
        "codec",
        "encryption_key",
        "prefetch_policy",
        "prefetch_timeout_s",
        "client_hints",
        "write_policy",
        "eviction_policy",
    ],
    _CACHE,
    host_capacity="2x",
)
def serve(
    model: Annotated[
        str, typer.Argument(help="A built-in model, or a local directory in Hugging Face format.")
    ] = "kvtier-tiny",
    host: Annotated[
        str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port; 0 takes any free one.", rich_help_panel=_SERVER)
    ] = 8000,
    control_key: Annotated[
        str | None,
        typer.Option(
            help="Key of the routes that look up, prefetch, pin and delete prompts; without one "
            f"there are none. Better given as {CONTROL_KEY_VARIABLE} in the environment.",
            rich_help_panel=_SERVER,
            show_default="none",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that clients must send. Repeat the option to accept several keys. Better "
            f"given as {KEY_VARIABLE} in the environment (several keys separated by blanks), where "
            "other users of the machine never see it.",
            rich_help_panel=_SERVER,
            show_default="none",
        ),
    ] = None,
    metrics_open: Annotated[
        bool,
        typer.Option(
            "--metrics-open",
            help="Serve /metrics without a key, like /health.",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose pages may send requests from a browser, like https://chat.example; "
            "* for every page. Repeat the option for several.",
            rich_help_panel=_SERVER,
            show_default="none",
        ),
    ] = None,
    ssl_certfile: Annotated[
        str | None,
        typer.Option(
            help="Certificate in PEM, to serve HTTPS. It is read again when it changes.",
            rich_help_panel=_SERVER,
            show_default="none",
        ),
    ] = None,
    ssl_keyfile: Annotated[
        str | None,
        typer.Option(
            help="The certificate's key in PEM, if it is in another file.",
            rich_help_panel=_SERVER,
            show_default="none",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in the API.", rich_help_panel=_SERVER)
    ] = None,
    max_body_bytes: Annotated[
        str, typer.Option(help='Longest request body: "8MiB", or bytes.', rich_help_panel=_SERVER)
    ] = "8MiB",
    max_connections: Annotated[
        int,
        typer.Option(
            help="Most open connections; some more are reserved for /health, /metrics and the live "
            "page.",
            rich_help_panel=_SERVER,
        ),
    ] = 1024,
    header_timeout_s: Annotated[
        float,
        typer.Option(
            help="Timeout of a connection for a complete request header, in seconds.",
            rich_help_panel=_SERVER,
        ),
    ] = 10.0,
    body_timeout_s: Annotated[
        float,
        typer.Option(help="Timeout for a request's body, in seconds.", rich_help_panel=_SERVER),
    ] = 30.0,
    write_timeout_s: Annotated[
        float,
        typer.Option(
            help="Timeout of a client that does not read its answer, in seconds.",
            rich_help_panel=_SERVER,
        ),
    ] = 60.0,
    shutdown_grace_s: Annotated[
        float,
        typer.Option(
            help="Seconds for which requests in flight may continue after SIGTERM.",
            rich_help_panel=_SERVER,
        ),
    ] = 30.0,
    record: Annotated[
        str,
        typer.Option(
            help="File to record requests to for kvtier replay: salted hashes, lengths and times, "
            "no text and no token ids.",
            rich_help_panel=_SERVER,
            show_default="none",
        ),
    ] = "",
    record_max_bytes: Annotated[
        str,
        typer.Option(
            help="Most bytes of the recording; the oldest requests are deleted.",
            rich_help_panel=_SERVER,
        ),
    ] = "1GiB",
    events: Annotated[
        str,
        typer.Option(
            help="ZeroMQ address at which KV events are published for routers: "
            "tcp://127.0.0.1:5557. They contain token ids of prompts.",
            rich_help_panel=_SERVER,
            show_default="none",
        ),
    ] = "",
    events_replay: Annotated[
        str,
        typer.Option(
            help="ZeroMQ address at which routers request events that they missed.",
            rich_help_panel=_SERVER,
            show_default="none",
        ),
    ] = "",
    events_topic: Annotated[
        str,
        typer.Option(
            help="Topic of the events: kv@HOST:PORT@MODEL for llm-d.",
            rich_help_panel=_SERVER,
            show_default="none",
        ),
    ] = "",
    traces: Annotated[
        bool,
        typer.Option(
            "--traces",
            help="Send spans of requests to the endpoint in OpenTelemetry's environment variables "
            "(OTEL_EXPORTER_OTLP_ENDPOINT).",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    log_level: Annotated[
        LogLevel, typer.Option(help="Level of the log on stderr.", rich_help_panel=_SERVER)
    ] = LogLevel.INFO,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(
            help="Format of the log: text, or json with one object per line. KVTIER_LOG_FORMAT in "
            "the environment sets the same.",
            rich_help_panel=_SERVER,
            show_default="text",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, npu:0, ...", rich_help_panel=_MODEL)
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_MODEL)
    ] = "auto",
    max_running: Annotated[
        int, typer.Option(help="Most requests decoded together.", rich_help_panel=_MODEL)
    ] = 64,
    max_queue: Annotated[
        int,
        typer.Option(help="Most queued requests; others get status 429.", rich_help_panel=_MODEL),
    ] = 512,
    max_model_tokens: Annotated[
        int,
        typer.Option(
            help="Most tokens of prompt and answer together; 0 for the model's limit.",
            rich_help_panel=_MODEL,
        ),
    ] = 0,
    chunk_tokens: Annotated[
        int,
        typer.Option(help="Tokens per prefill chunk.", rich_help_panel=_MODEL),
    ] = CHUNK_TOKENS,
    threads: Annotated[
        int, typer.Option(help="Compute threads; 0 for torch's choice.", rich_help_panel=_MODEL)
    ] = 0,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Reuse KV of earlier prompts.",
            rich_help_panel=_CACHE,
        ),
    ] = True,
    device_capacity: Annotated[
        str, typer.Option(help="Size of the device KV pool.", rich_help_panel=_CACHE)
    ] = "256MiB",
    block_size: Annotated[
        int, typer.Option(help="Tokens per block.", rich_help_panel=_CACHE)
    ] = BLOCK_SIZE,
    *,
    settings: Mapping[str, Any],
) -> None:
    """Serve a model with an OpenAI-compatible API."""
    with starting("serve") as on_ready:
        from kvtier.observe.logs import format_of, log_to_stderr
        from kvtier.serve.engine import EngineConfig
        from kvtier.serve.server import ServerConfig
        from kvtier.tools.cli.serving import serve_until_ended

        log_to_stderr(log_level, format_of(log_format))
        key = take_key_source(settings.get("encryption_key", ""))
        server_config = ServerConfig(
            host=host,
            port=port,
            api_key=take_keys(api_key),
            control_key=take_control_key(control_key),
            metrics_open=metrics_open,
            cors_origin=cors_origin,
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
            served_model_name=served_model_name,
            max_body_bytes=parse_size(max_body_bytes, "max_body_bytes"),
            max_connections=max_connections,
            header_timeout_s=header_timeout_s,
            body_timeout_s=body_timeout_s,
            write_timeout_s=write_timeout_s,
            max_choices=max(1, min(64, max_queue)),
            shutdown_grace_s=shutdown_grace_s,
            record=record,
            record_max_bytes=parse_size(record_max_bytes, "record_max_bytes"),
            traces=traces,
        )
        engine_config = EngineConfig(
            model=model,
            device=device,
            dtype=dtype,
            block_size=block_size,
            chunk_tokens=chunk_tokens,
            device_capacity=device_capacity,
            max_running=max_running,
            max_queue=max_queue,
            max_model_tokens=max_model_tokens,
            prefix_cache=prefix_cache,
            threads=threads,
            events=events,
            events_replay=events_replay,
            events_topic=events_topic,
            cache=CacheConfig(**{**settings, "encryption_key": key}),
        )
        serve_until_ended(engine_config, server_config, on_ready)
