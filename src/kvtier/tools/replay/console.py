"""Print the result of a replay to a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.core.errors import printable
from kvtier.tools.replay.assumptions import DEFAULT
from kvtier.tools.replay.result import ReplayResult
from kvtier.tools.replay.sizing import Point
from kvtier.tools.replay.summary import (
    CANT_TELL,
    RECOMMENDED,
    SIZE_COLUMNS,
    WEAK,
    WRITTEN,
    can_tell,
    headline,
    hit_rows,
    paragraphs,
    policy_name,
    setup_cells,
    size_cells,
    size_mark,
    subtitle,
)
from kvtier.tools.report.figures import capacity


def show_result(console: Console, result: ReplayResult) -> None:
    """Print hit ratios by policy and size, savings and cost of each size, and a recommendation."""

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style))

    say(headline(result), "bold")
    say(subtitle(result))
    if result.host:
        console.print(_hits(result))
        console.print(
            _sizes("Host memory, without a disk", result.host, result, is_disk=False),
        )
        above = capacity(result.best_host.num_bytes) if result.best_host is not None else "no"
        title = f"A disk below {above} host memory"
        if result.disk:
            console.print(_sizes(title, result.disk, result, is_disk=True))
    if result.evidence.has_contents:
        console.print(_setups(result))
    console.print(_assumptions(result))
    for note in result.facts.notes:
        say(printable(note), "dim")
    verdict, *basis = paragraphs(result)
    say(verdict, "bold")
    for each in basis:
        say(each)


def _table(title: str, columns: Sequence[str], caption: str = "") -> Table:
    table = Table(title=title, title_style="bold", title_justify="left", caption=caption or None)
    table.caption_justify = "left"
    for at, name in enumerate(columns):
        table.add_column(name, justify="right" if at else "left", no_wrap=not at)
    return table


def _hits(result: ReplayResult) -> Table:
    """Return the table of hit ratios. With many policies it has no room for the time saved."""
    with_time = len(result.curves) <= 3
    saved = ", share of prefill time saved" if with_time else ""
    names = ["size", *map(policy_name, result.curves), "unlimited"]
    table = _table(f"Hit ratio of blocks{saved}, by policy and size of one tier", names)
    for cells in hit_rows(result, with_time):
        table.add_row(*cells)
    return table


def _sizes(title: str, points: Sequence[Point], result: ReplayResult, is_disk: bool) -> Table:
    names = [*SIZE_COLUMNS, *([WRITTEN] if is_disk else [])]
    styles = {RECOMMENDED: "bold green", CANT_TELL: "dim"}
    has_weak = not all(can_tell(result, point) for point in points)
    table = _table(title, names, WEAK if has_weak else "")
    table.add_column("", no_wrap=True)
    for point in points:
        mark = size_mark(result, point, is_disk)
        table.add_row(*size_cells(result, point, is_disk), mark, style=styles.get(mark, ""))
    return table


def _setups(result: ReplayResult) -> Table:
    table = _table(
        "Prompt tokens by source",
        ["", "tiers", "device", "host", "disk", "computed", "prefill time saved"],
    )
    for setup in result.setups:
        table.add_row(*setup_cells(result, setup))
    return table


def _assumptions(result: ReplayResult) -> Table:
    table = Table(title="Assumptions", title_style="bold", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column()
    for assumption in result.assumptions:
        style = "yellow" if assumption.source == DEFAULT else "dim"
        table.add_row(assumption.name, assumption.value, Text(printable(assumption.source), style))
    return table
