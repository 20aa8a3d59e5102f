"""API keys of a server and of its clients, from the command line or the environment."""

from __future__ import annotations

import os

from kvtier.cli.arguments import hide_arguments
from kvtier.errors import ConfigError

KEY_VARIABLE = "KVTIER_API_KEY"
"""Environment variable that holds the API key, or several keys separated by blanks."""


def take_keys(given: list[str] | None) -> list[str] | None:
    """Return the API keys of the command line, or of the environment.

    The command line no longer shows them afterwards, and no child process inherits those of the
    environment.
    """
    variable = os.environ.pop(KEY_VARIABLE, None)
    if given:
        hide_arguments(given)
        return given
    # An empty variable is a mistake, and no open door.
    return None if variable is None else variable.split() or [""]


def take_key(given: str | None) -> str | None:
    """Return a client's key.

    The option's, which ``ps`` then shows no longer, or the first one of the environment; None for
    none.

    Raises:
        ConfigError: No header can carry the key.
    """
    keys = take_keys(None if given is None else [given])
    key = keys[0] if keys else ""
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("api_key: the key has characters that no header can send")
    return key or None
