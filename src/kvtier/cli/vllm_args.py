"""``kvtier vllm-args``: print options for ``vllm serve``."""

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


def vllm_args(
    host_capacity: Annotated[
        str, typer.Option(help="Host DRAM for KV, of all ranks together.")
    ] = "4GiB",
    disk_path: Annotated[
        str, typer.Option(help="Directory for KV on a local disk; no disk by default.")
    ] = "",
    disk_capacity: DiskCapacity = "",
    storage: Annotated[
        list[str] | None,
        typer.Option(
            help='A store that servers share, below host memory and the disk: "valkey://host". '
            "Repeat the option for several, fastest first. Give a password in the server's "
            "environment, not here."
        ),
    ] = None,
    storage_capacity: StorageCapacity = "",
    storage_shards: StorageShards = 0,
    storage_stages: Annotated[
        int, typer.Option(min=0, help="The same for pipeline parallelism.")
    ] = 0,
    codec: Codec = "",
    encryption_key: EncryptionKey = "",
    node: Node = "",
    node_tenant: NodeTenant = "",
    policy: Policy = "",
    record: Record = "",
    record_max_bytes: RecordMaxBytes = "",
    blocks_per_chunk: Annotated[
        int, typer.Option(min=1, help="Number of vLLM blocks per kvtier block.")
    ] = 1,
    connector: Annotated[
        str,
        typer.Option(
            help="OffloadingConnector or KvtierConnector; auto takes the first that fits the "
            "installed vLLM."
        ),
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Print the option that enables kvtier in vLLM, to be appended to ``vllm serve MODEL``.

    In a script: --kv-transfer-config "$(kvtier vllm-args --json ...)".
    """
    from kvtier.connectors.vllm.fronts import front_named
    from kvtier.connectors.vllm.settings import VllmSettings

    front = front_named(connector)
    extra: dict[str, object] = dict(front.extra)
    if not node:
        extra["host_capacity"] = host_capacity
    extra |= given(
        disk_path=disk_path,
        disk_capacity=disk_capacity,
        storage=one_or_all(storage),
        storage_capacity=storage_capacity,
        storage_shards=storage_shards,
        storage_stages=storage_stages,
        codec=codec,
        encryption_key=encryption_key,
        node=node,
        node_tenant=node_tenant,
        eviction_policy=policy,
        record=record,
        record_max_bytes=record_max_bytes,
    )
    if blocks_per_chunk > 1:
        extra["blocks_per_chunk"] = blocks_per_chunk
    VllmSettings.read(extra)  # raises here what vLLM would raise at its start
    config = {
        "kv_connector": front.connector,
        **front.config,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    text = json.dumps(config, separators=(",", ":"))
    typer.echo(text if as_json else f"--kv-transfer-config {shlex.quote(text)}")
