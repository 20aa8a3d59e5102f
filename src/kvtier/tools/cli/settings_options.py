"""Options of commands from the fields of settings: name, default and help are the setting's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from functools import wraps
from typing import Annotated, Any, Final

import typer

from kvtier.core.config import CHOICES

MAIN: Final = ("host_capacity", "disk_path", "disk_capacity", "storage", "node")
"""The settings that matter: help shows them before all others."""
MAIN_PANEL: Final = "The five settings that matter"


def settings_options(
    kind: type, names: Sequence[str], panel: str | None = None, **defaults: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of some settings, the main ones first.

    The command is called with ``settings``, the values by name that differ from the defaults of
    ``kind``.

    Args:
        kind: dataclass of the settings.
        names: of its fields.
        panel: panel of the help in which they stand.
        defaults: defaults of this command alone.
    """
    known = {field.name: field for field in fields(kind)}
    ordered = sorted(names, key=lambda name: name not in MAIN)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [
            parameter for parameter in signature.parameters.values() if parameter.name != "settings"
        ]
        # Arguments stay first; the main settings go before all other options.
        made = [_parameter(known[name], panel, defaults) for name in ordered]
        num_main = sum(name in MAIN for name in names)
        option = typer.models.OptionInfo
        arguments = [parameter for parameter in own if type(_typer_info(parameter)) is not option]
        options = [parameter for parameter in own if type(_typer_info(parameter)) is option]
        parameters = [*arguments, *made[:num_main], *options, *made[num_main:]]

        @wraps(command)
        def called(**given: Any) -> None:
            settings = {}
            for name in names:
                value = given.pop(name)
                value = tuple(value) if isinstance(value, list) else value
                # None, or (): a list that was not given. A 0 that was given is a value.
                if value not in (None, ()) and str(value) != str(known[name].default):
                    settings[name] = value
            command(settings=settings, **given)

        as_keywords = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters
        ]
        called.__signature__ = signature.replace(parameters=as_keywords)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate


def _typer_info(parameter: inspect.Parameter) -> object:
    metadata = getattr(parameter.annotation, "__metadata__", (None,))
    return metadata[0]


def _parameter(
    field: Field[Any], panel: str | None, defaults: Mapping[str, object]
) -> inspect.Parameter:
    name, kind = field.name, str(field.type)
    value_type: Any = CHOICES.get(name) or {"int": int, "float": float}.get(kind, str)
    if "Sequence[str]" in kind:
        value_type = list[str]
    default = defaults.get(name, field.default)
    shown = str(field.metadata["shown"])
    option = typer.Option(
        "--" + name.replace("_", "-"),
        help=_help(field),
        rich_help_panel=MAIN_PANEL if name in MAIN else panel,
        show_default=shown if shown and not default else True,
    )
    if value_type == list[str]:
        value_type, default = list[str] | None, None
    elif value_type is str:
        default = str(default)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[value_type, option],
    )


def _help(field: Field[Any]) -> str:
    meaning = str(field.metadata["meaning"])
    return meaning + " Repeat the option for several." * ("Sequence[str]" in str(field.type))
