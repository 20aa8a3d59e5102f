"""Options of commands from the fields of settings: name, default and help are the setting's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from functools import wraps
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvtier.core.config import CHOICES, variable_of

MAIN: Final = ("host_capacity", "disk_path", "disk_capacity", "storage", "node")
"""The settings that matter: help shows them before all others."""
MAIN_PANEL: Final = "The five settings that matter"
_TYPES: Final = {"int": int, "float": float, "bool": bool, "Path": Path}
"""Types of options by the annotation of the field; all others take text."""


def settings_options(
    kind: type,
    names: Sequence[str] = (),
    panel: str | None = None,
    into: str = "settings",
    *,
    reads_environment: bool = False,
    **defaults: object,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of some settings, the main ones first.

    The command is called with the values by name that differ from the defaults of ``kind``.

    Args:
        kind: dataclass of the settings.
        names: of its fields; by default, all that say what they mean.
        panel: panel of the help for those that name none.
        into: argument of the command for the values. The decorator may be repeated.
        reads_environment: whether an option that is not given takes the value of its environment
            variable, see ``_variables``.
        defaults: defaults of this command alone.
    """
    known = {field.name: field for field in fields(kind) if "meaning" in field.metadata}
    names = names or [*known]
    variables = _variables(kind) if reads_environment else {}
    main = [name for name in names if name in MAIN and not known[name].metadata["panel"]]
    others = [name for name in names if name not in main]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != into]
        # Arguments stay first; the main settings go before all other options.
        is_option = [isinstance(_typer_info(each), typer.models.OptionInfo) for each in own]
        parameters = [
            *compress(own, map(not_, is_option)),
            *(_parameter(known[name], MAIN_PANEL, defaults, variables) for name in main),
            *compress(own, is_option),
            *(_parameter(known[name], panel, defaults, variables) for name in others),
        ]

        @wraps(command)
        def called(**given: Any) -> None:
            settings = {}
            for name in names:
                value = given.pop(name)
                value = tuple(value) if isinstance(value, list) else value
                # None, or (): a list that was not given. A 0 that was given is a value.
                if value in (None, ()):
                    continue
                has_default = defaults.get(name, known[name].default) is not None
                if not has_default or str(value) != str(known[name].default):
                    settings[name] = value
            command(**{into: settings}, **given)

        as_keywords = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters
        ]
        called.__signature__ = signature.replace(parameters=as_keywords)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate


def _variables(kind: type) -> dict[str, str]:
    """Return the environment variables of the settings in ``kind`` that belong to a cache.

    These are declared in the module of ``variable_of``. Settings of one command, such as a port,
    are declared elsewhere.
    """
    return {
        name: variable_of(name)
        for part in kind.__mro__
        if part.__module__ == variable_of.__module__
        for name in vars(part).get("__annotations__", ())
    }


def _typer_info(parameter: inspect.Parameter) -> object:
    metadata = getattr(parameter.annotation, "__metadata__", (None,))
    return metadata[0]


def _parameter(
    field: Field[Any],
    panel: str | None,
    defaults: Mapping[str, object],
    variables: Mapping[str, str],
) -> inspect.Parameter:
    name, kind = field.name, str(field.type)
    is_list = "Sequence[" in kind
    value_type: Any = CHOICES.get(name) or _TYPES.get(
        kind.removesuffix(" | None").removeprefix("Sequence[").removesuffix("]"), str
    )
    default = defaults.get(name, field.default)
    shown = str(field.metadata["shown"])
    more = dict(field.metadata["option"])
    usual = "--" + name.replace("_", "-")
    option = typer.Option(
        more.pop("names", f"{usual}/--no-{usual[2:]}" if default is True else usual),
        help=str(field.metadata["meaning"]) + " Repeat the option for several." * is_list,
        rich_help_panel=field.metadata["panel"] or panel,
        show_default=shown if shown and not default else True,
        envvar=variables.get(name) or None,
        show_envvar=False,
        **more,
    )
    if is_list:
        value_type, default = list[value_type] | None, None
    elif default is None:
        value_type = value_type | None
    elif value_type is str:
        default = str(default)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[value_type, option],
    )
