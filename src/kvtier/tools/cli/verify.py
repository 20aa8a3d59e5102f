"""``kvtier verify``: read every block of a slab, compare its checksum, repair on request."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.core.errors import printable
from kvtier.observe.live.wording import size
from kvtier.tools.cli.output import AsJson, print_json
from kvtier.tools.report.figures import counted

if TYPE_CHECKING:
    from rich.console import Console

    from kvtier.tiers.disk.inspect.check import CheckReport

MAX_BLOCKS = 20


def verify(
    path: Annotated[Path, typer.Argument(help="Directory of a slab.")],
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Forget damaged blocks, rewrite the journal, and reuse quarantined slots that can "
            "be read.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every block of a slab and verify its checksum. Refused while a process uses the slab.

    Exits with 1 if something is wrong and was not repaired, with 2 if the slab can't be read.
    """
    from rich.console import Console

    from kvtier.tiers.disk.inspect.check import check_slab
    from kvtier.tools.report.bar import counting_bar

    with counting_bar("verifying") as note:
        report = check_slab(path, repair, note)
    if as_json:
        print_json({**asdict(report), "is_right": report.is_right})
    else:
        show_check(Console(), report)
    if not report.is_right and not report.is_repaired:
        raise typer.Exit(1)


def show_check(console: Console, report: CheckReport) -> None:
    """Print the report, and how to repair the slab."""
    from rich.table import Table

    def say(line: str) -> None:
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)

    say(f"{report.path}: {report.num_blocks:,} blocks, {size(report.num_bytes)} read")
    if report.bad_blocks:
        table = Table(title=counted(len(report.bad_blocks), "bad block"), title_justify="left")
        table.add_column("slot", justify="right", no_wrap=True)
        table.add_column("reason", no_wrap=True)
        table.add_column("key", no_wrap=True)
        table.add_column("namespace", no_wrap=True)
        for bad_block in report.bad_blocks[:MAX_BLOCKS]:
            table.add_row(
                str(bad_block.slot), bad_block.reason, bad_block.key[:16], bad_block.namespace[:16]
            )
        console.print(table)
        if len(report.bad_blocks) > MAX_BLOCKS:
            say(f"and {len(report.bad_blocks) - MAX_BLOCKS:,} more: --json names them all")
    if report.num_damaged_records:
        say(f"the journal: {counted(report.num_damaged_records, 'damaged record')}")
    if report.num_whole_superblocks < 2:
        say("one of the two superblocks is damaged")
    if report.is_encrypted:
        say("the blocks are encrypted: their stored bytes were compared, not what they decrypt to")
    if not report.was_clean:
        say("the slab was not closed in order; that alone does no harm")
    if report.num_quarantined:
        again = f", {report.num_released:,} of them used again" if report.is_repaired else ""
        say(f"{counted(report.num_quarantined, 'slot')} quarantined after I/O errors{again}")
    if report.is_right:
        say("nothing is wrong")
    elif report.is_repaired:
        say("repaired: what was wrong is forgotten, and will be computed again")
    else:
        say("repair it with --repair, or delete the directory")
