"""The server's listening socket."""

from __future__ import annotations

import ipaddress
import socket

from kvtier.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to ``host`` and ``port`` (0: any free one), not listening yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host: can't listen on {host!r}: {error.strerror}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise _taken(host, port, error) from error
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
