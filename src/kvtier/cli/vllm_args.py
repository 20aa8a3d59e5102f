"""``kvtier vllm-args``: what to add to ``vllm serve``."""

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


def vllm_args(
    host_capacity: Annotated[
        str, typer.Option(help="Host DRAM for KV, of all ranks together.")
    ] = "4GiB",
    disk_path: Annotated[
        str, typer.Option(help="Directory for KV on a local disk; none without.")
    ] = "",
    disk_capacity: DiskCapacity = "",
    storage: Annotated[
        list[str] | None,
        typer.Option(
            help='A store that servers share, below host memory and the disk: "valkey://host". '
            "Several: the option again, the fastest first. Without a password: name that in the "
            "server's environment."
        ),
    ] = None,
    storage_capacity: StorageCapacity = "",
    policy: Policy = "",
    record: Record = "",
    record_max_bytes: RecordMaxBytes = "",
    blocks_per_chunk: Annotated[
        int, typer.Option(min=1, help="Blocks of vLLM's that make one of kvtier's.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Print the option that puts kvtier under vLLM, to be pasted behind ``vllm serve MODEL``.

    In a script: --kv-transfer-config "$(kvtier vllm-args --json ...)".
    """
    from kvtier.connectors.vllm import SPEC_NAME
    from kvtier.connectors.vllm.settings import VllmSettings

    extra: dict[str, object] = {"spec_name": SPEC_NAME, "host_capacity": host_capacity}
    extra |= given(
        disk_path=disk_path,
        disk_capacity=disk_capacity,
        storage=one_or_all(storage),
        storage_capacity=storage_capacity,
        eviction_policy=policy,
        record=record,
        record_max_bytes=record_max_bytes,
    )
    if blocks_per_chunk > 1:
        extra["blocks_per_chunk"] = blocks_per_chunk
    VllmSettings.read(extra)  # refuses what vLLM would refuse when it starts
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    text = json.dumps(config, separators=(",", ":"))
    typer.echo(text if as_json else f"--kv-transfer-config {shlex.quote(text)}")
