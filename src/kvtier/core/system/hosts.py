"""Addresses of this machine."""

from __future__ import annotations

import ipaddress
import socket

LOCAL_NAMES = ("localhost", "ip6-localhost", "ip6-loopback")


def is_local(host: str) -> bool:
    """Return whether ``host`` is a loopback address, or a name of one. No name is looked up."""
    name = host.rstrip(".").lower()
    if name in LOCAL_NAMES or name.endswith(".localhost"):
        return True
    try:
        # Reads also the short forms that the system connects to, such as "127.1".
        found = socket.getaddrinfo(name, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    address = ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    # A connection to the unspecified address reaches this machine.
    return address.is_loopback or address.is_unspecified
