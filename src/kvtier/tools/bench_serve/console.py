"""Print the summary of a run to a terminal: a table, and conclusions."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.tools.bench_serve.result import ServeResult
from kvtier.tools.bench_serve.summary import conclusion, headline, verdicts
from kvtier.tools.report.target import target_words


def show_result(console: Console, result: ServeResult) -> None:
    """Print the findings as a table, the targets of a run at full size, and the conclusions."""
    table = Table(title=headline(result), title_style="bold", title_justify="left")
    table.add_column("Finding", style="bold", no_wrap=True)
    table.add_column("Result")
    table.add_column("Meaning", style="dim")
    for verdict in verdicts(result):
        style = {True: "green", False: "bold red", None: ""}[verdict.good]
        table.add_row(verdict.title, Text(verdict.figure, style), Text(verdict.meaning))
    console.print(table)
    if result.sample is not None:
        ending, continuation = result.sample.ending, result.sample.continuation
        console.print(Text.assemble("A prompt ended, ", ("and the model went on:", "bold green")))
        console.print(Text.assemble((ending, "dim"), (continuation, "green")))
    if not result.options.quick:
        for target in result.targets:
            console.print(target_words(target), highlight=False)
    console.print(Text("In short", "bold"))
    for paragraph in conclusion(result):
        console.print(Text(paragraph))
