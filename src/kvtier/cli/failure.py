"""Errors that a person caused are told in one sentence, without a traceback."""

from __future__ import annotations

from typing import NoReturn

import typer

from kvtier.errors import printable

USAGE = 2
"""Exit code for a setting that can't be used."""


def fail(command: str, reason: object) -> NoReturn:
    """Print why to stderr and exit with ``USAGE``. A name in it can't command the terminal."""
    lines = map(printable, str(reason).split("\n"))
    typer.echo(f"kvtier {command}: " + "\n".join(lines), err=True)
    raise typer.Exit(USAGE)
