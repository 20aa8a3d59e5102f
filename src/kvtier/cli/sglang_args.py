"""``kvtier sglang-args``: what to add to ``sglang serve``."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer

from kvtier.cli.failure import fail
from kvtier.errors import CacheError


def sglang_args(
    disk_path: Annotated[str, typer.Option(help="Directory for KV on a local disk.")],
    disk_capacity: Annotated[
        str, typer.Option(help="How much of that disk to use, of all ranks together.")
    ],
    load_policy: Annotated[
        str, typer.Option(help="auto: what is faster to compute is not read; always: to measure.")
    ] = "auto",
    namespace: Annotated[
        str, typer.Option(help="KV is shared only under the same text; for what no file tells.")
    ] = "",
) -> None:
    """Print the options that put kvtier under SGLang, to be pasted behind its launch command."""
    from kvtier.connectors.sglang.settings import OPTION, Settings

    extra: dict[str, object] = {
        "backend_name": "kvtier",
        "module_path": "kvtier.connectors.sglang.entry",
        "class_name": "KvtierStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "disk_path": disk_path,
        "disk_capacity": disk_capacity,
    }
    if load_policy != "auto":
        extra["load_policy"] = load_policy
    if namespace:
        extra["namespace"] = namespace
    try:
        Settings.read(extra)
    except CacheError as error:
        fail("sglang-args", error)
    text = json.dumps(extra, separators=(",", ":"))
    typer.echo(
        "--enable-hierarchical-cache --hicache-storage-backend dynamic "
        f"{OPTION} {shlex.quote(text)}"
    )
