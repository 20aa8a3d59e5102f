"""``kvtier doctor``: what was detected, as a table or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kvtier.tools.cli.detect import Diagnosis, diagnose
from kvtier.tools.cli.output import AsJson, print_json


def doctor(
    as_json: AsJson = False,
    disk_path: Annotated[
        str | None,
        typer.Option(
            help="Folder on a disk for which direct reads by the accelerator, past host memory, "
            "are tried. A file of 32 MiB is written there and removed.",
            show_default="none",
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            help="Socket of a node. Shows what an engine that is started here would find of it.",
            show_default="none",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model to load and to check, as kvtier serve takes it. Shows what its KV is, and "
            "whether it would be served.",
            show_default="none",
        ),
    ] = None,
) -> None:
    """Show devices, packages and the paths in use, and why better ones are not.

    Loads no model unless one is named.
    """
    diagnosis = diagnose(disk_path=disk_path, node=node, model=model)
    if as_json:
        print_json(asdict(diagnosis))
    else:
        _print_table(diagnosis)


def _print_table(diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"kvtier {diagnosis.version}", title_justify="left", show_lines=False)
    table.add_column("", style="bold", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("note", style="dim", overflow="fold")
    shown: set[str] = set()
    for section, findings in diagnosis.sections.items():
        table.add_section()
        table.add_row(Text(section, style="bold cyan"))
        for finding in findings:
            note = "as above" if finding.note in shown else finding.note
            shown |= {finding.note} - {""}
            table.add_row(f"  {finding.topic}", Text(finding.found), Text(note))
    Console().print(table)
