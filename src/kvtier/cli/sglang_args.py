"""``kvtier sglang-args``: print options for ``sglang serve``."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer

from kvtier.cli.engine_options import (
    AsJson,
    Codec,
    DiskCapacity,
    EncryptionKey,
    Node,
    NodeTenant,
    Policy,
    Record,
    RecordMaxBytes,
    StorageCapacity,
    StorageShards,
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
            help="Host DRAM for KV, of all ranks together, for the linker, which replaces SGLang's "
            "own hierarchical cache. Without it, the disk is below that cache."
        ),
    ] = "",
    storage: Annotated[
        list[str] | None,
        typer.Option(
            help='A store that servers share: "valkey://host". With the linker it is below the '
            "disk, and the option may be repeated, fastest first. Otherwise one store is allowed, "
            "instead of a disk. Give a password in the server's environment, not here."
        ),
    ] = None,
    storage_capacity: StorageCapacity = "",
    storage_shards: StorageShards = 0,
    codec: Codec = "",
    encryption_key: EncryptionKey = "",
    node: Node = "",
    node_tenant: NodeTenant = "",
    policy: Policy = "",
    record: Record = "",
    record_max_bytes: RecordMaxBytes = "",
    load_policy: Annotated[
        str,
        typer.Option(
            help="auto: KV that is faster to compute is not read; always: all is read, to measure."
        ),
    ] = "auto",
    namespace: Annotated[
        str,
        typer.Option(
            help="Text that must be equal for KV to be shared; for what the model's files don't "
            "tell."
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Print the options that enable kvtier in SGLang, to be appended to its launch command."""
    from kvtier.connectors.sglang.settings import LinkerSettings, StorageSettings

    ours = given(
        host_capacity=host_capacity,
        disk_path=disk_path,
        disk_capacity=disk_capacity,
        storage=one_or_all(storage),
        storage_capacity=storage_capacity,
        storage_shards=storage_shards,
        codec=codec,
        encryption_key=encryption_key,
        node=node,
        node_tenant=node_tenant,
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
