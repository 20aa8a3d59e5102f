"""Options of the commands that print an engine's options: what is the same for all engines."""

from __future__ import annotations

from typing import Annotated

import typer

DiskCapacity = Annotated[
    str, typer.Option(help="How much of that disk to use, of all ranks together.")
]
StorageCapacity = Annotated[
    str, typer.Option(help="How much of each store to know of at a time; 1TiB without.")
]
Record = Annotated[
    str,
    typer.Option(
        help="File to record requests to for kvtier replay: salted hashes, lengths and times, "
        "no text and no token ids."
    ),
]
RecordMaxBytes = Annotated[
    str, typer.Option(help="Space that the recording may take; 1GiB without.")
]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        help="Which KV leaves a full tier first: runs learns what is used again, lru takes what "
        "was used longest ago; runs without.",
    ),
]


AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the JSON alone, without the shell's quotes: the value of the last option, for "
        "scripts and containers.",
    ),
]


def given(**settings: object) -> dict[str, object]:
    """Those that the user gave, as the connectors' settings are called."""
    return {name: value for name, value in settings.items() if value}


def one_or_all(storage: list[str] | None) -> str | list[str]:
    """Return the only value of a repeatable option, or all its values."""
    return storage[0] if storage and len(storage) == 1 else storage or ""
