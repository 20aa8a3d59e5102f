"""The server's listening sockets."""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import ExitStack

from kvtier.core.errors import ConfigError

UNAVAILABLE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of an address that a name has, and this machine does not, such as ::1 without IPv6."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Return sockets bound to all addresses of ``host``, not listening yet; those of IPv4 first.

    port: the same for all of them; 0 for any that is free.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"host: can't listen on {host!r}: {error.strerror}") from error
    unavailable: OSError | None = None
    with ExitStack() as undo:
        made: list[socket.socket] = []
        for family, address in sorted({(family, address) for family, *_, address in found}):
            # After the first socket the port is known.
            chosen = made[0].getsockname()[1] if made else port
            try:
                made.append(_bound(family, (address[0], chosen, *address[2:])))
            except OSError as error:
                if error.errno not in UNAVAILABLE:
                    raise _taken(host, chosen, error) from error
                unavailable = error
            else:
                undo.callback(made[-1].close)
        if unavailable is not None and not made:
            raise _taken(host, port, unavailable) from unavailable
        undo.pop_all()
    return made


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def listen(bound: socket.socket, num_waiting: int) -> None:
    """Let clients connect. Raises ``ConfigError`` if another process listens on the port by now.

    num_waiting: connections that the system queues until they are accepted.
    """
    try:
        bound.listen(num_waiting)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _taken(host, port, error) from error


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the address that clients use."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only programs on this machine can reach it."""
    host: str = listener.getsockname()[0]
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _taken(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"port: can't listen on {host}:{port}: {error.strerror}; choose another port, or 0 for "
        "any free one"
    )
