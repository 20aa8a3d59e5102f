"""Output of commands: one JSON object, and what commands that measure print and write."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.core.config import without_password
from kvtier.core.errors import printable

if TYPE_CHECKING:
    from kvtier.tools.report.bar import ProgressBar

STDOUT = "-"
PIPED_WIDTH = 120
"""Columns of output that is not a terminal, so that no table is cut."""
OUTPUT = "Output"

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help='Write the result as JSON; "-" for stdout.',
        rich_help_panel=OUTPUT,
    ),
]
Report = Annotated[
    Path, typer.Option(help="File to write the HTML report to.", rich_help_panel=OUTPUT)
]
NoReport = Annotated[
    bool, typer.Option("--no-report", help="Write no report.", rich_help_panel=OUTPUT)
]


def say(line: str) -> None:
    """Print a line, with control characters escaped."""
    typer.echo(printable(line))


def print_json(found: object) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(found, indent=2))


class Output:
    """Output of a command that measures: text, JSON, and a page.

    Args:
        json_file: file for the JSON object, or "-" for stdout; text for people goes to stderr then.
        report: file for the page; None for none.
    """

    def __init__(self, json_file: str | None, report: Path | None = None) -> None:
        from rich.console import Console

        self.json_file, self.report = json_file, report
        self.console = Console(
            stderr=json_file == STDOUT, highlight=False, markup=False, emoji=False
        )
        if not self.console.is_terminal and "COLUMNS" not in os.environ:
            self.console.width = PIPED_WIDTH
        self.command = shlex.join(["kvtier", *map(without_password, sys.argv[1:])])

    def check_packages(self, wanted: list[str], extra: str) -> None:
        """Raise ``ConfigError`` for missing packages, before an hour is spent measuring.

        Those of the page are wanted, too. extra: the extra of kvtier that installs them.
        """
        from kvtier.core.errors import ConfigError, install_command

        wanted = [*wanted, *(["matplotlib", "jinja2"] if self.report else [])]
        missing = [name for name in wanted if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} not installed; install all that is needed: "
                f"{install_command(extra)}"
                + (", or leave the report out with --no-report" if self.report else "")
            )

    def progress(self) -> closing[ProgressBar]:
        """Show the progress of a measurement on stderr."""
        from rich.console import Console

        from kvtier.tools.report.bar import ProgressBar

        return closing(ProgressBar(Console(stderr=True)))

    def write_json(self, found: Mapping[str, object]) -> None:
        """Write the JSON object where it is wanted; the file's directory is made if missing."""
        if self.json_file is None:
            return
        text = json.dumps(found, indent=2)
        if self.json_file == STDOUT:
            print(text)
        else:
            _write(text + "\n", Path(self.json_file))

    def write_page(self, html: str) -> None:
        """Write the page; its directory is made if missing."""
        assert self.report is not None
        _write(html, self.report)
        self.console.print(f"Report: {self.report}", soft_wrap=True)


def _write(text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
