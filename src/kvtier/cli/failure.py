"""Errors that a person caused are told in one sentence, without a traceback."""

from __future__ import annotations

from typing import NoReturn

import typer

USAGE = 2
"""Exit code for a setting that can't be used."""


def fail(command: str, reason: object) -> NoReturn:
    """Print one line to stderr and exit with ``USAGE``."""
    typer.echo(f"kvtier {command}: {reason}", err=True)
    raise typer.Exit(USAGE)
