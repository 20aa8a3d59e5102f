"""Base class of all commands: help, and the configuration file."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache, wraps
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, TypeVar, cast

import typer
from typer.core import TyperCommand

from kvtier.core.errors import CacheError, ConfigError, printable
from kvtier.core.system.user_paths import user_path
from kvtier.tools.cli.failure import Commands, fail
from kvtier.tools.cli.output import OUTPUT, STDOUT
from kvtier.tools.cli.settings_options import MAIN_PANEL

JSON, HELP_ALL = "--json", "--help-all"

Function = TypeVar("Function", bound=Callable[..., Any])


class CommandLine(typer.Typer):
    """A group of commands of class ``Command``. Help is plain text, since tables cut names."""

    def __init__(self, **named: Any) -> None:
        super().__init__(cls=Commands, no_args_is_help=True, rich_markup_mode=None, **named)

    def command(self, name: str | None = None, **named: Any) -> Callable[[Function], Function]:
        add = super().command(name, cls=Command, **named)

        def added(function: Function) -> Function:
            add(_with_user_paths(function))
            return function

        return added


class Command(TyperCommand):
    """A command whose options can also come from a TOML file."""

    def __init__(self, *arguments: Any, params: list[Any] | None = None, **named: Any) -> None:
        own = params or []
        has_main = any(getattr(param, "rich_help_panel", None) == MAIN_PANEL for param in own)
        shared = [param for param in _shared_params() if has_main or HELP_ALL not in param.opts]
        super().__init__(*arguments, params=[*own, *shared], **named)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        name = " ".join(ctx.command_path.split()[1:])
        if any(JSON in param.opts and not getattr(param, "is_flag", True) for param in self.params):
            args = _with_stdout(args)
        try:
            return super().parse_args(ctx, args)
        except (CacheError, OSError) as error:  # of the configuration file
            fail(name, error)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options by their panel, without cutting names on narrow terminals.

        Commands with main settings explain these, and only name all others: ``--help-all``
        explains them, too.
        """
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                usual = "Options" if _is_option(param) else "Arguments"
                panel = getattr(param, "rich_help_panel", None) or usual
                sections.setdefault(panel, []).append(record)
        if OUTPUT in sections:
            sections[OUTPUT] = sections.pop(OUTPUT)  # after what is measured
        is_short = MAIN_PANEL in sections and not ctx.meta.get(HELP_ALL)
        for panel, records in sections.items():
            with formatter.section(panel):
                if is_short and panel not in ("Arguments", MAIN_PANEL):
                    _write_names(formatter, [record[0] for record in records])
                else:
                    formatter.write_dl(records)
        if is_short:
            formatter.write_paragraph()
            formatter.write_text(f"What the others mean: {ctx.command_path} {HELP_ALL}")


def _with_user_paths(function: Function) -> Function:
    """Return ``function``, called with paths in which ``~`` is replaced."""

    def replaced(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(replaced(each) for each in value)
        return user_path(value) if isinstance(value, Path) else value

    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **{name: replaced(value) for name, value in named.items()})

    return cast(Function, called)


def _write_names(formatter: Any, options: list[str]) -> None:
    """Write the names of options without their types, none of them over two lines."""
    names = ", ".join(option.partition(" <")[0].partition(" FILE")[0] for option in options)
    width = formatter.width - formatter.current_indent
    for line in wrap(names, width, break_on_hyphens=False, break_long_words=False):
        formatter.write(" " * formatter.current_indent + line + "\n")


def _is_option(param: Any) -> bool:
    return bool(param.param_type_name == "option")


def _with_stdout(args: list[str]) -> list[str]:
    """Return ``args`` with "-" after each ``--json`` without a file."""
    told: list[str] = []
    for at, arg in enumerate(args):
        told.append(arg)
        following = args[at + 1] if at + 1 < len(args) else None
        if arg == JSON and (following is None or following.startswith("--")):
            told.append(STDOUT)
    return told


def _read_config(ctx: typer.Context, param: typer.CallbackParam, name: str | None) -> None:
    """Make the settings of the file ``name`` the defaults of this call."""
    if name is None:
        return
    try:
        with user_path(name).open("rb") as file:
            settings = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {printable(name)} is no TOML file: {error}") from None
    params = {_key(each): each for each in ctx.command.params if each is not param}
    ctx.default_map = {}
    for key, value in settings.items():
        if (option := params.get(key.replace("_", "-"))) is None:
            near = get_close_matches(key.replace("_", "-"), params, 1)
            hint = f"; did you mean {near[0]}?" if near else "; see --help for the names"
            raise ConfigError(f"config: {name}: {key!r} is no option of this command{hint}")
        ctx.default_map[option.name] = _checked(name, key, value, option)


def _show_all(ctx: typer.Context, is_wanted: bool) -> None:
    """Print the help with all options, and exit."""
    if is_wanted:
        ctx.meta[HELP_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def _options(
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE.toml",
            help="File with defaults of this command's options, under the same names.",
            is_eager=True,
            expose_value=False,
            callback=_read_config,
        ),
    ] = None,
    help_all: Annotated[
        bool,
        typer.Option(
            HELP_ALL,
            help="Show this message with all options explained, and exit.",
            is_eager=True,
            expose_value=False,
            callback=_show_all,
        ),
    ] = False,
) -> None:
    """Declare the options that every command has."""


@cache
def _shared_params() -> list[Any]:
    app = typer.Typer(add_completion=False)
    app.command()(_options)
    return list(typer.main.get_command(app).params)


def _key(param: Any) -> str:
    """Return the name of an option without its dashes, or of an argument."""
    names = [opt[2:] for opt in param.opts if opt.startswith("--")]
    return names[0] if names else str(param.name).replace("_", "-")


def _checked(name: str, key: str, value: object, param: Any) -> object:
    """Return ``value`` in the form that the parser takes.

    Raises:
        ConfigError: the value has the wrong type for the option.
    """
    is_list = param.multiple or param.nargs != 1
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not is_list:
        raise ConfigError(f"config: {name}: {key!r} takes one value; give no list")
    is_flag = getattr(param, "is_flag", False)
    for each in values:
        if is_flag != isinstance(each, bool) or not isinstance(each, str | int | float):
            wanted = "true or false" if is_flag else "text or a number"
            raise ConfigError(f"config: {name}: {key!r} is {each!r}; give {wanted}")
    return values if is_list else value
