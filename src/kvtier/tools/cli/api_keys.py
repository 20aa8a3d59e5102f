"""API keys of a server and of its clients, from the command line or the environment."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

KEY_VARIABLE = "KVTIER_API_KEY"
"""Environment variable that holds the API key, or several keys separated by blanks."""
CONTROL_KEY_VARIABLE = "KVTIER_CONTROL_KEY"
"""Environment variable that holds the key of a server's control."""
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", help=f"Key of the server; better given as {KEY_VARIABLE} in the environment."
    ),
]
_ARG_START, _ARG_END = 48, 49
"""Fields of /proc/self/stat, counted from 1, that hold the addresses of the command line."""


def take_keys(given: list[str] | None) -> list[str] | None:
    """Return the API keys of the command line, or of the environment.

    Keys are hidden from the process's command line, and removed from the environment, so that no
    child process inherits them.
    """
    variable = os.environ.pop(KEY_VARIABLE, None)
    if given:
        hide_arguments(given)
        return given
    # An empty variable is a mistake; it must not disable the check.
    return None if variable is None else variable.split() or [""]


def take_key(given: str | None) -> str | None:
    """Return a client's key: the option's, or the first one of the environment; None for none.

    The key is hidden as by ``take_keys``.

    Raises:
        ConfigError: the key can't be sent in a header.
    """
    from kvtier.observe.live.client import check_api_key

    keys = take_keys(None if given is None else [given])
    return check_api_key(keys[0]) or None if keys else None


def take_control_key(given: str | None) -> str | None:
    """Return the key of a server's control, of the command line or the environment.

    It is hidden as by ``take_keys``.
    """
    variable = os.environ.pop(CONTROL_KEY_VARIABLE, None)
    if given is not None:
        hide_arguments([given])
        return given
    return variable


def take_key_source(given: str) -> str:
    """Return ``--encryption-key``; hidden as by ``take_keys`` where it may hold a secret."""
    if not given.startswith(("file:", "env:")):
        hide_arguments([given])
    return given


def hide_arguments(secrets: Collection[str]) -> None:
    """Overwrite ``secrets`` with stars in this process's command line, as ``ps`` shows it.

    They are visible until this call. Systems without /proc are not supported.
    """
    with suppress(OSError, ValueError, IndexError):
        # The second field is a name in parentheses, which may hold blanks.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START - 3]), int(fields[_ARG_END - 3])
        if not 0 < start < end:
            return
        line = (ctypes.c_char * (end - start)).from_address(start)
        hidden = {secret.encode() for secret in secrets if secret}
        line.raw = b"\0".join(_hidden(each, hidden) for each in line.raw.split(b"\0"))


def _hidden(argument: bytes, secrets: Collection[bytes]) -> bytes:
    """Replace the secret in ``--option secret`` and ``--option=secret``, keeping its length."""
    option, equals, value = b"", b"", argument
    if argument.startswith(b"--"):
        option, equals, value = argument.partition(b"=")
    return option + equals + b"*" * len(value) if value in secrets else argument
