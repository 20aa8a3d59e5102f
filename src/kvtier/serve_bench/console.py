"""What a terminal shows: a progress bar while it runs, a table at the end."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from kvtier.serve_bench.progress import Progress
from kvtier.serve_bench.result import ServeResult
from kvtier.serve_bench.target import target_words
from kvtier.serve_bench.words import headline, verdicts


class ProgressBar(Progress):
    """One bar per experiment. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._bars = RichProgress(
            TextColumn("{task.description:<20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            console=console,
        )
        self._task: TaskID | None = None

    def begin(self, title: str, num_steps: int) -> None:
        self._task = self._bars.add_task(title, total=num_steps, note="")

    def advance(self, note: str = "") -> None:
        if self._task is not None:
            self._bars.update(self._task, advance=1, note=note)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()


def show_result(console: Console, result: ServeResult) -> None:
    """The findings as a table, then the targets."""
    table = Table(title=headline(result), title_style="bold", title_justify="left")
    table.add_column("What", style="bold", no_wrap=True)
    table.add_column("Result")
    table.add_column("Which means", style="dim")
    for verdict in verdicts(result):
        style = {True: "green", False: "bold red", None: ""}[verdict.good]
        table.add_row(verdict.title, Text(verdict.figure, style), Text(verdict.meaning))
    console.print(table)
    if result.sample is not None:
        ending, continuation = result.sample.ending, result.sample.continuation
        console.print(Text.assemble("A prompt ended, ", ("and the model went on:", "bold green")))
        console.print(Text.assemble((ending, "dim"), (continuation, "green")))
    for target in result.targets:
        console.print(target_words(target), highlight=False)
