"""Progress bar in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

from kvtier.tools.report.progress import Progress


class ProgressBar(Progress):
    """One bar per experiment. ``close`` it."""

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
        self._bars.start()  # not before: an error before the first step is printed alone
        self._task = self._bars.add_task(title, total=num_steps, note="")

    def advance(self, note: str = "") -> None:
        if self._task is not None:
            self._bars.update(self._task, advance=1, note=note)

    def close(self) -> None:
        """Leave the bars as they are."""
        if self._task is not None:
            self._bars.stop()


@contextmanager
def counting_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr for work that reports how much is done, and of how much.

    Shows nothing if stderr is no terminal.
    """
    console = Console(stderr=True)
    with RichProgress(
        title,
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
