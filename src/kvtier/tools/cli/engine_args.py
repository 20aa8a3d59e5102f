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

ENTRY: Final = "kvtier.connectors.sglang.entry"
"""Module that SGLang loads."""
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
    "storage_shards",
    "codec",
    "encryption_key",
    "node",
    "node_tenant",
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


@settings_options(EngineSettings, [*SETTINGS, "storage_stages"], host_capacity="4GiB")
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
    from kvtier.connectors.vllm.shared.fronts import front_named
    from kvtier.connectors.vllm.shared.grid import SCHEDULER
    from kvtier.connectors.vllm.shared.settings import VllmSettings

    front = front_named(connector)
    extra: dict[str, object] = {**front.extra, **_as_json(settings)}
    if "node" in settings:
        extra.pop("host_capacity", None)
    if blocks_per_chunk > 1:
        extra["blocks_per_chunk"] = blocks_per_chunk
    if grid:
        extra["grid"] = grid
    VllmSettings.read(extra)  # raises here what vLLM would raise at its start
    config = {
        "kv_connector": front.connector,
        **front.config,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    text = json.dumps(config, separators=(",", ":"))
    scheduler = f"--scheduler-cls {SCHEDULER} " if grid else ""
    typer.echo(text if only_json else f"{scheduler}--kv-transfer-config {shlex.quote(text)}")


@settings_options(EngineSettings, [*SETTINGS, "load_policy", "namespace"])
def sglang_args(only_json: AsJson = False, *, settings: Mapping[str, object]) -> None:
    """Print the options that enable kvtier in SGLang, to be appended to its launch command.

    With --host-capacity it is the linker, which replaces SGLang's own hierarchical cache, and has
    the disk and any number of stores below it. Without, a disk or one store is below that cache.
    """
    from kvtier.connectors.sglang.shared.settings import LinkerSettings, StorageSettings

    ours = _as_json(settings)
    is_linked = "host_capacity" in ours
    read = LinkerSettings.read(ours) if is_linked else StorageSettings.read(ours)
    if is_linked:
        option, name = "--unified-cache-external-linker", "--enable-unified-cache-external-linker"
        config: dict[str, object] = {
            "linker": "KvtierLinker",
            "linker_module_path": ENTRY,
            "linker_extra_config": ours,
        }
    else:
        option, name = "--hicache-storage", "--enable-hierarchical-cache"
        config = {
            "backend_name": "kvtier",
            "module_path": ENTRY,
            "class_name": "KvtierStorage",
            "interface_v1": 1,
            "hicache_storage_pass_prefix_keys": True,
            **ours,
        }
    text = json.dumps(config, separators=(",", ":"))
    if only_json:
        typer.echo(text)
    else:
        typer.echo(f"{name} {option}-backend dynamic {read.option} {shlex.quote(text)}")
