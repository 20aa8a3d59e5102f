"""Errors of commands: one sentence on stderr, and an exit status."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from kvtier.core.errors import CacheError, install_command, printable

logger = logging.getLogger(__name__)

USAGE = 2
"""Exit status of a command that could not do its work: a bad setting, a bad file, or a server that
does not answer. A command that ran and found something wrong exits with 1."""


def fail(command: str, reason: object) -> NoReturn:
    """Print ``reason`` to stderr, with control characters escaped, and exit with ``USAGE``."""
    lines = map(printable, str(reason).split("\n"))
    typer.echo(f"kvtier {command}: " + "\n".join(lines), err=True)
    raise typer.Exit(USAGE)


@contextmanager
def starting(command: str) -> Iterator[Callable[[], None]]:
    """Report any error of a start in one sentence, with exit status ``USAGE``.

    Yields a function to call when the start is complete; later errors are raised unchanged. The
    traceback is logged at level DEBUG.
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
        if isinstance(error, CacheError):
            raise  # Commands reports it, with the names of the command's options
        fail(command, _sentence(error))


class Commands(TyperGroup):
    """Typer group that reports errors which the user or the machine caused in one sentence.

    The exit status is ``USAGE``. Its help shows the first sentence of each command uncut.
    """

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with their summaries, over several lines on a narrow terminal."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                paragraph = (command.help or "").partition("\n\n")[0].replace("``", "")
                rows.append((name, " ".join(paragraph.split())))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of our output has gone: no message is needed
        except (CacheError, OSError, typer.BadParameter) as error:
            groups = ctx.command_path.split()[1:]
            is_value = isinstance(error, typer.BadParameter)
            command = self.commands[ctx.invoked_subcommand]
            reason = _bad_value(error) if is_value else _with_options(str(error), command)
            fail(" ".join([*groups, ctx.invoked_subcommand]), reason)


def _sentence(error: Exception) -> str:
    """Return ``error`` in one line; one that is not kvtier's own says how to find its origin."""
    if isinstance(error, ImportError):
        return f"{error}; install what the engine needs: {install_command('engine')}"
    reason = str(error).strip().partition("\n")[0].rstrip(".:")
    kind = type(error).__name__
    told = f"{kind}: {reason}" if reason else kind
    return f"can't start: {told}; --log-level debug shows where it comes from"


def _with_options(reason: str, command: Any) -> str:
    """Return ``reason`` with settings written as the options of a command: --host-capacity."""
    options = {str(param.name): param.opts[0] for param in command.params if _is_long(param)}

    def written(found: re.Match[str]) -> str:
        name, is_first = found[1], not found.start()
        is_setting = name in options and ((is_first and bool(found[2])) or "_" in name)
        return (options[name] if is_setting else name) + found[2]

    reason = re.sub(r"^\w*extra_config: ", "", reason)
    return re.sub(r"(?<![\w'\"/.=-])([a-z]+(?:_[a-z]+)*)\b(:(?= )|)", written, reason)


def _is_long(param: Any) -> bool:
    return bool(param.opts and param.opts[0].startswith("--"))


def _bad_value(error: Any) -> str:
    """Return the option, its value and what it should be, in one sentence."""
    option = error.param.opts[0] if error.param else error.param_hint
    reason = error.message.rstrip(".")
    # Newer releases of typer have values checked by pydantic, whose sentences leave them out.
    for found in getattr(error.__cause__, "errors", list)()[:1]:
        value = repr(found["input"])
        what = found["msg"].partition(", unable")[0].rstrip(".").removeprefix("Value error, ")
        reason = what if value in what else f"{value} {what.replace('Input should', 'should')}"
    return f"{option}: {reason}"
