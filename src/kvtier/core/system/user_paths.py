"""Paths that users give, and the folder in their cache directory."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvtier.core.errors import ConfigError

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/|[A-Za-z0-9.-]*:\d+/?$")
"""URL, or HOST:PORT."""
MAX_SOCKET_BYTES = 107
"""Longest path of a Unix socket."""


def user_path(given: str | Path) -> Path:
    """Return the path that a user means: a leading ``~`` is a home directory.

    A shell replaces it only at the beginning of a word, so not in ``--disk-path=~/kv``, in TOML or
    in JSON.

    Raises ``ConfigError`` if there is no such directory.
    """
    try:
        return Path(given).expanduser()
    except RuntimeError:
        raise ConfigError(f"{given}: there is no such home directory; write the path out") from None


def check_socket(path: str | Path, field: str) -> None:
    """Raise ``ConfigError`` for an address, or a path that is too long for a Unix socket.

    field: name of the setting.
    """
    if _ADDRESS.match(str(path)):
        # Path makes http:/host of http://host.
        address = re.sub(":/+", "://", str(path))
        raise ConfigError(
            f"{field}: {address} is a network address; name the path of a "
            "node's Unix socket, as in /run/kvtier/node.sock"
        )
    num = len(os.fsencode(user_path(path)))
    if num > MAX_SOCKET_BYTES:
        raise ConfigError(
            f"{field}: the path {path} has {num} bytes, and that of a Unix socket at most "
            f"{MAX_SOCKET_BYTES}; name a shorter one"
        )


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/kvtier`` or ``~/.cache/kvtier``, which may not exist yet.

    It is for data that can be recomputed. A user without a home directory, as in containers with an
    arbitrary user id, gets a folder that nobody makes.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "kvtier"
    try:
        return Path.home() / ".cache/kvtier"
    except RuntimeError:
        return Path("/nonexistent/kvtier")
