"""Command line and output of a benchmark: options, tables for the terminal, JSON for files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def parser_of(module: str, text: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that benchmarks have in common.

    Args:
        module: name of the benchmark's module below ``benchmarks``.
        text: docstring of the module; its first line is the description.
    """
    description = (text or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    return parser


def set_usual(
    options: argparse.Namespace, usual: Mapping[str, object], quick: Mapping[str, object]
) -> None:
    """Set the options that were not given to their usual values, or to those of ``--quick``."""
    for name, value in (quick if options.quick else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def table_of(
    title: str,
    left: Sequence[str],
    right: Sequence[str],
    rows: Iterable[Sequence[str]],
    sections: int = 0,
) -> Table:
    """Return a table.

    Args:
        title: its title.
        left: headings of the first columns, whose cells are aligned to the left.
        right: headings of the columns with figures.
        rows: cells of each line.
        sections: a section ends where one of so many first cells changes.
    """
    table = Table(title=title)
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    before: Sequence[str] | None = None
    for row in rows:
        if before is not None and before[:sections] != row[:sections]:
            table.add_section()
        table.add_row(*row)
        before = row
    return table


def report(
    path: str | None,
    benchmark: str,
    machine: Mapping[str, object],
    rows: Iterable[object],
    targets: Iterable[Mapping[str, object]],
    *tables: Table,
    **more: object,
) -> None:
    """Print tables and targets, and write the result as JSON to ``path``; "-" is stdout.

    Args:
        path: of the file; None to write none.
        benchmark, machine, rows, targets: of the result. Rows that are dataclasses become objects.
        tables: the tables.
        more: further fields of the result.
    """
    console = Console(stderr=path == "-")
    judged = list(targets)
    for each in (*tables, *judged):
        console.print(each)
    result = {
        "benchmark": benchmark,
        "machine": machine,
        **more,
        "rows": [_json_row(row) for row in rows],
        "targets": judged,
    }
    if path == "-":
        json.dump(result, sys.stdout, indent=1)
        print()
    elif path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _json_row(row: object) -> Any:
    return asdict(row) if is_dataclass(row) and not isinstance(row, type) else row
