"""``kvtier remote``: maintain a store that replicas share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.core.errors import ConfigError
from kvtier.observe.live.wording import seconds, size
from kvtier.tools.cli.api_keys import take_key_source
from kvtier.tools.cli.command import CommandLine
from kvtier.tools.cli.output import AsJson, print_json, say
from kvtier.tools.report.figures import counted

if TYPE_CHECKING:
    from kvtier.tiers.remote.keeper import StoreKeeper
    from kvtier.tiers.remote.migration import Migrated
    from kvtier.tiers.remote.pruning import Contents, Pruned

Codec = Annotated[str, typer.Option(help="Codec to store with: none, lossless, or a plug-in.")]

app = CommandLine()


def key_option(text: str) -> Any:
    """Return an option for encryption keys. text: its help."""
    return typer.Option(help=text, show_default="KVTIER_ENCRYPTION_KEY in the environment, if set")


SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@app.callback()
def remote() -> None:
    """Maintain a store that replicas share."""


Url = Annotated[
    str,
    typer.Argument(help="URL of the store, as in --storage: valkey://host, s3://bucket/prefix"),
]


@app.command()
def check(url: Url, as_json: AsJson = False) -> None:
    """Check that a store supports kvtier, and show what kvtier has stored there.

    Exits with 2 if the store can't be used or reached.
    """
    from kvtier.tiers.remote.pruning import Contents

    with _keeper(url) as keeper:
        state, there = keeper.test(), Contents.of(keeper.entries())
        if as_json:
            told = {"where": keeper.where, "state": state, "kind": keeper.kind, **asdict(there)}
            print_json(told)
        else:
            say(f"{keeper.where}: {state}")
            say(f"there: {_contents(there, keeper)}")


@app.command()
def prune(
    url: Url,
    older_than: Annotated[
        str | None,
        typer.Option(
            help="Remove blocks not used for this long (Valkey), or written this long ago "
            "(buckets): "
            '"7d", "12h", "30min".',
            show_default="any age",
        ),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            help="Then remove the oldest blocks until kvtier's blocks take at most this many "
            'bytes: "1TiB".',
            show_default="any size",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old blocks from a store, and their manifests from a bucket.

    Replicas may run meanwhile. A removed block that one of them still expects is computed again.

    Only blocks that kvtier has written are removed: each block's header is verified first.
    """
    from kvtier.core.config import parse_size
    from kvtier.tiers.remote.pruning import prune as prune_store

    with _keeper(url) as keeper:
        if older_than is None and max_bytes is None:
            raise ConfigError("nothing to go by; give --older-than, --max-bytes or both")
        found = prune_store(
            keeper,
            inf if older_than is None else _seconds(older_than),
            inf if max_bytes is None else parse_size(max_bytes, "max_bytes"),
            is_real=not dry_run,
        )
        if as_json:
            told = {"where": keeper.where, "kind": keeper.kind, "dry_run": dry_run, **asdict(found)}
            print_json(told)
        else:
            _show(found, keeper, dry_run)


@app.command()
def migrate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FROM",
            help='URL of the store to copy, with the secret of its blocks: "valkey://host".',
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TO",
            help='URL of the store to copy to: "s3://bucket/kv".',
        ),
    ],
    codec: Codec = "none",
    encryption_key: Annotated[
        str,
        key_option(
            'Keys to store with: "file:/path", "env:NAME" or "command:program arguments"; '
            "none to store unencrypted."
        ),
    ] = "",
    from_encryption_key: Annotated[str, key_option("Keys of the blocks to copy.")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show how many blocks would be copied.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy the blocks of a store into another one, or under another prefix, codec or key.

    Each block is verified when it is read, and read again after it was written. Replicas may run
    meanwhile. When it was interrupted, start it again: blocks that are there are left out.

    Exits with 1 if some blocks could not be copied, with 2 if a store can't be used or reached.
    """
    from kvtier.core.config import CodingConfig
    from kvtier.tiers.remote.migration import StoreAccess
    from kvtier.tiers.remote.migration import migrate as migrate_store
    from kvtier.tools.report.bar import counting_bar

    with counting_bar("copying") as note:
        of_source = StoreAccess(
            source, CodingConfig(encryption_key=take_key_source(from_encryption_key))
        )
        to = StoreAccess(target, CodingConfig(codec, take_key_source(encryption_key)))
        found = migrate_store(of_source, to, note, is_real=not dry_run)
    tell_migrated(found, "would be copied" if dry_run else "copied", as_json, dry_run=dry_run)


def tell_migrated(found: Migrated, verb: str, as_json: bool, **more: object) -> None:
    """Print what was copied. Exits with 1 if some blocks could not be copied."""
    if as_json:
        print_json({**more, **asdict(found)})
    else:
        say(f"{verb}: {counted(found.num_copied, 'block')}, {size(found.num_bytes)}")
        if found.num_there:
            say(f"there already: {counted(found.num_there, 'block')}")
        if found.num_refused:
            say(f"no room for: {counted(found.num_refused, 'block')}")
        if found.num_unreadable:
            say(
                f"not copied: {counted(found.num_unreadable, 'block')} of another key, secret or "
                "codec, or gone by now"
            )
        if found.num_damaged:
            say(f"not copied: {counted(found.num_damaged, 'damaged block')}")
    if found.num_damaged or found.num_unreadable:
        raise typer.Exit(1)


@contextmanager
def _keeper(url: str) -> Iterator[StoreKeeper]:
    from kvtier.tiers.remote.pruning import make_keeper

    keeper = make_keeper(url)
    try:
        yield keeper
    finally:
        keeper.close()


def _seconds(text: str) -> float:
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]+)\s*", text)
    if not found or found[2] not in SECONDS:
        raise ConfigError(
            f"older_than: can't read {text!r} as a time; write a number and one of "
            f"{', '.join(SECONDS)}, for instance 7d"
        )
    return float(found[1]) * SECONDS[found[2]]


def _contents(there: Contents, keeper: StoreKeeper) -> str:
    told = f"{counted(there.num_entries, keeper.kind)}, {size(there.num_bytes)}"
    if there.oldest_s is None or there.newest_s is None:
        return told
    newest, oldest = (seconds(round(each)) for each in (there.newest_s, there.oldest_s))
    return f"{told}; {keeper.age.format(f'{newest} to {oldest}')}"


def _show(found: Pruned, keeper: StoreKeeper, dry_run: bool) -> None:
    verb = "would be removed" if dry_run else "removed"
    say(f"{keeper.where}: {_contents(found.before, keeper)}")
    say(f"{verb}: {counted(found.num_entries, keeper.kind)}, {size(found.num_bytes)}")
    if found.num_notes:
        say(f"{verb}, too: {counted(found.num_notes, 'manifest')} of nothing that is left")
    if found.num_strange:
        say(f"left alone: {found.num_strange:,} that are not kvtier's, damaged, or gone by now")
    if found.num_entries and not dry_run:
        say("what a replica still knows of them is a miss, and computed again")
