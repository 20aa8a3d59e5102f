"""Hide secrets of the command line from other users of the machine."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_ARG_START, _ARG_END = 48, 49
"""Fields of /proc/self/stat, the first being 1: where the kernel has the command line from."""


def hide_arguments(secrets: Collection[str]) -> None:
    """Write stars over ``secrets`` in this process's own command line, as ``ps`` shows it.

    Whoever looked before has seen them. Where there is no such file, nothing is done.
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
