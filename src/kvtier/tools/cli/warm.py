"""``kvtier warm``: copy the hottest blocks of a store into a directory of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.tools.cli.api_keys import take_key_source
from kvtier.tools.cli.output import AsJson
from kvtier.tools.cli.remote import Codec, key_option, tell_migrated


def warm(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FROM", help='URL of the store that replicas share: "s3://bucket/kv".'
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TO",
            help='Directory of this machine: "dir:///var/kv?capacity=300GiB".',
        ),
    ],
    max_bytes: Annotated[str, typer.Option("--bytes", help='Most bytes of KV to copy: "200GiB".')],
    codec: Codec = "none",
    encryption_key: Annotated[
        str,
        key_option(
            'Keys of both stores: "file:/path", "env:NAME" or "command:program arguments"; '
            "none for no encryption."
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Copy what is hottest in a store into a directory of this machine, for replicas that start.

    The blocks that were used last are copied first, or, in a store that does not record uses, those
    that were written last. Replicas may run meanwhile. Nothing in the directory is deleted to make
    room.

    Exits with 1 if some blocks could not be copied, with 2 if a store can't be used or reached.
    """
    from kvtier.core.config import CodingConfig, parse_size
    from kvtier.tiers.remote.migration import StoreAccess, migrate
    from kvtier.tiers.remote.warm_start import WarmDirectory
    from kvtier.tools.report.bar import counting_bar

    num_bytes = parse_size(max_bytes, "bytes")
    key = take_key_source(encryption_key)
    directory = WarmDirectory(target)
    try:
        with counting_bar("copying") as note:
            found = migrate(
                StoreAccess(source, CodingConfig(encryption_key=key)),
                StoreAccess(target, CodingConfig(codec, key)),
                note,
                max_bytes=num_bytes,
                takes=directory.reserve,
            )
    finally:
        directory.close()
    tell_migrated(found, "copied", as_json)
