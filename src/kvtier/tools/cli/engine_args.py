"""``kvtier vllm-args`` and ``kvtier sglang-args``: print options for an engine's launch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from kvtier.core.config import (
    AuditConfig,
    CodingConfig,
    DiskConfig,
    HostConfig,
    LoadConfig,
    ModeConfig,
    NodeClientConfig,
    PolicyConfig,
    RequestConfig,
    StageConfig,
)
from kvtier.tools.cli.settings_options import settings_options

AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print only the JSON value of the last option, without shell quotes, for scripts and "
        "containers.",
    ),
]


@dataclass(frozen=True)
class EngineSettings(
    AuditConfig,
    RequestConfig,
    LoadConfig,
    ModeConfig,
    StageConfig,
    PolicyConfig,
    CodingConfig,
    NodeClientConfig,
    DiskConfig,
    HostConfig,
):
    """Settings that have options."""


SETTINGS: Final = (
    "host_capacity",
    "disk_path",
    "disk_capacity",
    "storage",
    "storage_capacity",
    "warm_start",
    "storage_shards",
    "codec",
    "encryption_key",
    "node",
    "node_tenant",
    "engine_name",
    "mode",
    "eviction_policy",
    "audit",
    "record",
    "record_max_bytes",
)


def _as_json(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings as JSON has them: one value, or a list of several."""
    return {
        name: (value[0] if len(value) == 1 else [*value]) if isinstance(value, tuple) else value
        for name, value in settings.items()
    }


@settings_options(
    EngineSettings, [*SETTINGS, "storage_stages"], reads_environment=True, host_capacity="4GiB"
)
def vllm_args(
    blocks_per_chunk: Annotated[
        int, typer.Option(min=1, help="Number of vLLM blocks per kvtier block.")
    ] = 1,
    grid: Annotated[
        int,
        typer.Option(min=0, help="Tokens of the pieces in which prompts are reused; 0 for off."),
    ] = 0,
    connector: Annotated[
        str,
        typer.Option(
            help="OffloadingConnector or KvtierConnector; auto takes the first that fits the "
            "installed vLLM."
        ),
    ] = "auto",
    only_json: AsJson = False,
    *,
    settings: Mapping[str, object],
) -> None:
    """Print the option that enables kvtier in vLLM, to be appended to ``vllm serve MODEL``.

    In a script: --kv-transfer-config "$(kvtier vllm-args --json ...)".
    """
    from kvtier.connectors.vllm.shared.fronts import front_named, transfer_config
    from kvtier.connectors.vllm.shared.grid import SCHEDULER

    extra = _as_json(settings)
    if blocks_per_chunk > 1:
        extra["blocks_per_chunk"] = blocks_per_chunk
    if grid:
        extra["grid"] = grid
    config = transfer_config(front_named(connector), extra)
    text = json.dumps(config, separators=(",", ":"))
    scheduler = f"--scheduler-cls {SCHEDULER} " if grid else ""
    typer.echo(text if only_json else f"{scheduler}--kv-transfer-config {shlex.quote(text)}")


@settings_options(EngineSettings, [*SETTINGS, "load_policy", "namespace"], reads_environment=True)
def sglang_args(only_json: AsJson = False, *, settings: Mapping[str, object]) -> None:
    """Print the options that enable kvtier in SGLang, to be appended to its launch command.

    With --host-capacity it is the linker, which replaces SGLang's own hierarchical cache, and has
    the disk and any number of stores below it. Without, a disk or one store is below that cache.
    """
    from kvtier.connectors.sglang.shared.server_options import server_options

    options = server_options(_as_json(settings))
    *_, config = options.values()
    text = config if isinstance(config, str) else json.dumps(config, separators=(",", ":"))
    if only_json:
        typer.echo(text)
        return
    first, way, option = ("--" + name.replace("_", "-") for name in options)
    typer.echo(f"{first} {way} dynamic {option} {shlex.quote(text)}")
