"""Settings of a connector from environment variables, one per setting."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, Final

from kvtier.core.config import variable_of, without_password
from kvtier.core.errors import ConfigError

if TYPE_CHECKING:  # every engine that has kvtier installed imports this module
    from kvtier.connectors.common.settings import ConnectorSettings

PLACES: Final = ("host_capacity", "disk_path", "storage", "node")
"""Settings whose variables ask for kvtier: each names a place for KV. The others only refine."""
_SWITCH: Final = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}


def asked() -> list[str]:
    """Return the environment variables that ask for kvtier; empty if there are none."""
    return [variable for name in PLACES if os.environ.get(variable := variable_of(name))]


def settings_in_environment(kind: type[ConnectorSettings]) -> dict[str, object]:
    """Return the settings that have a variable in the environment, by their names.

    A list is separated by blanks. Raises ``ConfigError``, with the variable's name, for a value
    that can't be read.
    """
    return {
        field.name: _value(field, text)
        for field in fields(kind)
        if (variable := variable_of(field.name)) and (text := os.environ.get(variable))
    }


def shown(settings: Mapping[str, object]) -> str:
    """Return settings as a log line has them: by their variables, without passwords."""
    words = []
    for name, value in settings.items():
        parts = value if isinstance(value, list) else [value]
        text = " ".join(without_password(str(part)) for part in parts)
        words.append(f"{variable_of(name)}={text}")
    return ", ".join(words)


@contextmanager
def naming_variables(kind: type[ConnectorSettings]) -> Iterator[None]:
    """Name the variable of a setting, instead of the engine's option, in a ``ConfigError``."""
    try:
        yield
    except ConfigError as error:
        names = "|".join(field.name for field in fields(kind) if variable_of(field.name))
        sentence = str(error).removeprefix(f"{kind.option}: ")
        sentence = re.sub(rf"^({names})\b", lambda found: variable_of(found[0]), sentence)
        raise ConfigError(sentence) from None


def _value(field: Field[Any], text: str) -> object:
    """Return the value of a setting, as JSON would have it."""
    kind = str(field.type)
    if "Sequence[" in kind:
        parts = text.split()
        return parts[0] if len(parts) == 1 else parts
    readers: dict[str, Callable[[str], object]] = {
        "bool": lambda word: _SWITCH[word.lower()],
        "int": int,
        "float": float,
    }
    try:
        return readers.get(kind, str)(text)
    except (KeyError, ValueError):
        from kvtier.connectors.common.settings import HINTS

        advice = field.metadata.get("advice") or HINTS[kind]
        raise ConfigError(f"{variable_of(field.name)} can't be {text!r}; {advice}") from None
