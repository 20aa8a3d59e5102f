"""``kvtier sglang-args``: what to add to ``sglang serve``."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer

from kvtier.cli.engine_options import (
    AsJson,
    DiskCapacity,
    Policy,
    Record,
    RecordMaxBytes,
    StorageCapacity,
    given,
    one_or_all,
)

ENTRY = "kvtier.connectors.sglang.entry"


def sglang_args(
    disk_path: Annotated[str, typer.Option(help="Directory for KV on a local disk.")] = "",
    disk_capacity: DiskCapacity = "",
    host_capacity: Annotated[
        str,
        typer.Option(
            help="Host DRAM of kvtier's, of all ranks together: it takes the place of SGLang's own "
            "hierarchical cache (the linker). Without, the disk is put below that."
        ),
    ] = "",
    storage: Annotated[
        list[str] | None,
        typer.Option(
            help='A store that servers share: "valkey://host". Behind the linker, below the disk '
            "where there is one, and several by the option again, the fastest first; else one, in "
            "the place of the disk. Without a password: name that in the server's environment."
        ),
    ] = None,
    storage_capacity: StorageCapacity = "",
    policy: Policy = "",
    record: Record = "",
    record_max_bytes: RecordMaxBytes = "",
    load_policy: Annotated[
        str, typer.Option(help="auto: what is faster to compute is not read; always: to measure.")
    ] = "auto",
    namespace: Annotated[
        str, typer.Option(help="KV is shared only under the same text; for what no file tells.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Print the options that put kvtier under SGLang, to be pasted behind its launch command."""
    from kvtier.connectors.sglang.settings import LinkerSettings, StorageSettings

    ours = given(
        host_capacity=host_capacity,
        disk_path=disk_path,
        disk_capacity=disk_capacity,
        storage=one_or_all(storage),
        storage_capacity=storage_capacity,
        eviction_policy=policy,
        record=record,
        record_max_bytes=record_max_bytes,
        load_policy="" if load_policy == "auto" else load_policy,
        namespace=namespace,
    )
    settings = LinkerSettings.read(ours) if host_capacity else StorageSettings.read(ours)
    if host_capacity:
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
    if as_json:
        typer.echo(text)
    else:
        typer.echo(f"{name} {option}-backend dynamic {settings.option} {shlex.quote(text)}")
