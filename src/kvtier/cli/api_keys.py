"""The API keys of a server: of its command line, or of the environment."""

from __future__ import annotations

import os

from kvtier.cli.arguments import hide_arguments

KEY_VARIABLE = "KVTIER_API_KEY"
"""Of the environment; several keys with blanks in between."""


def take_keys(given: list[str] | None) -> list[str] | None:
    """Those of the command line, which then shows them no longer, or those of the environment,
    which no other program gets from this one."""
    variable = os.environ.pop(KEY_VARIABLE, None)
    if given:
        hide_arguments(given)
        return given
    # An empty variable is a mistake, and no open door.
    return None if variable is None else variable.split() or [""]
