"""Options that ``kvtier vllm-args`` and ``kvtier sglang-args`` share."""

from __future__ import annotations

from typing import Annotated

import typer

DiskCapacity = Annotated[str, typer.Option(help="Disk space for KV, of all ranks together.")]
StorageCapacity = Annotated[
    str,
    typer.Option(help="Most bytes of each store's blocks to keep track of; 1TiB by default."),
]
StorageShards = Annotated[
    int,
    typer.Option(
        min=0,
        help="Largest tensor parallel size of the servers that share the stores, whatever "
        "their own; 0 if all have the same.",
    ),
]
Codec = Annotated[
    str,
    typer.Option(
        help="Codec of new KV in stores: lossless (fewer bytes, the same bits), or auto (lossless "
        "for a store that is slow enough to gain by it); none by default."
    ),
]
EncryptionKey = Annotated[
    str,
    typer.Option(
        help='Keys with which KV on disk and in stores is encrypted: "file:/path", "env:NAME" or '
        '"command:program arguments". The first key encrypts, the others decrypt.'
    ),
]
Record = Annotated[
    str,
    typer.Option(
        help="File to record requests to for kvtier replay: salted hashes, lengths and times, "
        "no text and no token ids."
    ),
]
RecordMaxBytes = Annotated[str, typer.Option(help="Most bytes of the recording; 1GiB by default.")]
Node = Annotated[
    str,
    typer.Option(
        help="Socket of a kvtier node, whose memory, disk and stores the engines of this machine "
        "share, as in /run/kvtier/node.sock."
    ),
]
NodeTenant = Annotated[
    str, typer.Option(help="Tenant whose quota counts in the node; the default one by default.")
]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        help="Eviction policy: runs (the default) learns which KV is reused, lru evicts the least "
        "recently used.",
    ),
]


AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print only the JSON value of the last option, without shell quotes, for scripts and "
        "containers.",
    ),
]


def given(**settings: object) -> dict[str, object]:
    """Return the settings that the user gave, by the connectors' names."""
    return {name: value for name, value in settings.items() if value}


def one_or_all(storage: list[str] | None) -> str | list[str]:
    """Return the only value of a repeatable option, or all its values."""
    return storage[0] if storage and len(storage) == 1 else storage or ""
