"""``kvtier inspect``: the content of a slab of the disk tier, as tables or as JSON."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvtier.core.errors import printable
from kvtier.observe.live.wording import seconds, size
from kvtier.tools.cli.output import AsJson, print_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvtier.tiers.disk.inspect.report import SlabReport

MAX_NAMESPACES = 20
BAR_WIDTH = 30


def inspect(
    path: Annotated[Path, typer.Argument(help="Directory of a slab.")],
    as_json: AsJson = False,
) -> None:
    """Show the content of a slab by namespace, age and size. Read-only; the slab may be in use."""
    from kvtier.tiers.disk.inspect.report import report_slab

    now = time.time()
    report = report_slab(path, now)
    if as_json:
        print_json(asdict(report))
        return
    from rich.console import Console

    show_slab(Console(), report, now)


def show_slab(console: Console, report: SlabReport, now: float) -> None:
    """Print the report as tables. now: unix time, for ages."""
    console.print(_summary(report, now))
    if report.num_blocks:
        console.print(_namespaces(report, now))
        console.print(_ages(report))


ENCRYPTION: Final = (
    "AES-256-GCM: checksums are those of the encrypted bytes and can be verified; contents, and "
    "the keys that they need, are not looked at"
)


def describe_layout(description: str) -> str:
    """Return one line about the content of a block."""
    try:
        fields = json.loads(description)
        parts = fields["parts"]
        names = (
            parts
            if isinstance(parts, str)
            else ", ".join(f"{p['name']} {p['num_heads']}×{p['dim']}" for p in parts)
        )
        return printable(
            f"{fields['attention']} attention, {fields['num_layers']} layers, {names}, "
            f"{fields['dtype']}, {fields['block_size']} tokens per block"
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return description  # perhaps not written by kvtier


def _summary(report: SlabReport, now: float) -> Table:
    from rich.table import Table
    from rich.text import Text

    from kvtier.tiers.disk.sealing import ENCRYPTED

    title = Text(f"slab {printable(report.path)}")
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    filled = report.num_blocks / report.num_slots if report.num_slots else 0.0
    if report.owner:
        state = f"in use by {report.owner}"
    elif report.is_clean:
        state = "closed in order"
    else:
        state = "not closed in order: blocks are verified when they are first read"
    oddities = [
        f"{count} {what}"
        for count, what in (
            (report.num_quarantined, "slots quarantined after I/O errors"),
            (report.num_damaged, "damaged records"),
            (report.num_superseded, "older copies of a block"),
            (2 - report.num_whole_superblocks, "damaged superblock"),
        )
        if count
    ]
    rows = (
        ("blocks", f"{report.num_blocks:,} of {report.num_slots:,} slots ({filled:.1%})"),
        ("size", f"{size(report.used_bytes)} of {size(report.capacity_bytes)}"),
        (
            "a block",
            (
                f"{size(report.block_bytes)} in a slot of {size(report.slot_bytes)}: "
                f"{describe_layout(report.description)}"
            ),
        ),
        *([("encryption", ENCRYPTION)] if report.layout.endswith(ENCRYPTED) else []),
        ("layout", f"{report.layout}, rank {report.rank} of {report.num_ranks}"),
        (
            "journal",
            (
                f"{size(report.journal_bytes)}, {report.num_records:,} records, "
                f"{report.num_dead:,} of them dead"
            ),
        ),
        ("state", state),
        ("oddities", ", ".join(oddities) or "none"),
        ("made", f"{seconds(round(now - report.made_at))} ago, format {report.format_version}"),
    )
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _namespaces(report: SlabReport, now: float) -> Table:
    from rich.table import Table

    table = Table(title="namespaces, largest first", title_justify="left")
    table.add_column("namespace", no_wrap=True)
    for heading in ("blocks", "size", "longest", "newest", "oldest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for namespace in report.namespaces[:MAX_NAMESPACES]:
        table.add_row(
            namespace.digest[:16] or "(not named)",
            f"{namespace.num_blocks:,}",
            size(namespace.num_bytes),
            f"{namespace.longest_blocks:,}",
            seconds(round(now - namespace.newest_at)),
            seconds(round(now - namespace.oldest_at)),
        )
    rest = report.namespaces[MAX_NAMESPACES:]
    if rest:
        table.add_row(
            f"{len(rest):,} more",
            f"{sum(each.num_blocks for each in rest):,}",
            size(sum(each.num_bytes for each in rest)),
            f"{max(each.longest_blocks for each in rest):,}",
            seconds(round(now - max(each.newest_at for each in rest))),
            seconds(round(now - min(each.oldest_at for each in rest))),
        )
    return table


def _ages(report: SlabReport) -> Table:
    from rich.table import Table

    table = Table(title="age", title_justify="left")
    table.add_column("less than", no_wrap=True)
    table.add_column("blocks", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    most = max(age.num_blocks for age in report.ages)
    for age in report.ages:
        table.add_row(
            age.below,
            f"{age.num_blocks:,}",
            size(age.num_bytes),
            "█" * -(-BAR_WIDTH * age.num_blocks // most),
        )
    return table
