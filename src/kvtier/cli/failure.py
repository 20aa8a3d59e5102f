"""The boundary between commands and people: an error is one sentence and an exit status."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from kvtier.errors import CacheError, install_command, printable

logger = logging.getLogger(__name__)

USAGE = 2
"""Exit status of every command that could not do what it was told: a setting that can't be used, a
file or a server that does not answer. 1 is for a command that looked, and found something wrong."""


def fail(command: str, reason: object) -> NoReturn:
    """Print why to stderr and exit with ``USAGE``. A name in it can't command the terminal."""
    lines = map(printable, str(reason).split("\n"))
    typer.echo(f"kvtier {command}: " + "\n".join(lines), err=True)
    raise typer.Exit(USAGE)


@contextmanager
def starting(command: str) -> Iterator[Callable[[], None]]:
    """Tell every error of a start in one sentence, with exit status ``USAGE``.

    Yields a function to call when the start is complete: errors after that are raised as they are.
    The traceback is logged at the level DEBUG.
    """
    is_running = False

    def complete() -> None:
        nonlocal is_running
        is_running = True

    try:
        yield complete
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:  # of any library
        if is_running:
            raise
        logger.debug("start failed", exc_info=error)
        fail(command, _sentence(error))


class Commands(TyperGroup):
    """A Typer group that turns errors of its commands into a sentence and a status.

    Errors that the user or the machine caused are told in one sentence, with exit status ``USAGE``.
    """

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of our output has gone: nobody needs a message
        except (CacheError, OSError) as error:
            groups = ctx.command_path.split()[1:]
            fail(" ".join([*groups, ctx.invoked_subcommand]), error)


def _sentence(error: Exception) -> str:
    """``error`` in a line; one that is not kvtier's own says where it comes from."""
    if isinstance(error, CacheError):
        return str(error)
    if isinstance(error, ImportError):
        return f"{error}; install what the engine needs: {install_command('engine')}"
    reason = str(error).strip().partition("\n")[0].rstrip(".:")
    kind = type(error).__name__
    told = f"{kind}: {reason}" if reason else kind
    return f"can't start: {told}; --log-level debug shows where it comes from"
