"""Addresses that the server listens on."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kvtier.core.errors import ConfigError
from kvtier.serve.server.listener import bind

STREAM = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
V6 = (socket.AF_INET6, *STREAM, ("::1", 0, 0, 0))
V4 = (socket.AF_INET, *STREAM, ("127.0.0.1", 0))
NOT_HERE = (socket.AF_INET, *STREAM, ("192.0.2.1", 0))


def resolved(monkeypatch: pytest.MonkeyPatch, *found: Any) -> None:
    """Make every name resolve to these addresses."""
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: list(found))


def test_all_addresses_of_a_name_are_listened_on_at_one_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolved(monkeypatch, V6, V4, V6)
    made = bind("localhost", 0)
    try:
        assert [each.getsockname()[0] for each in made] == ["127.0.0.1", "::1"]
        assert len({each.getsockname()[1] for each in made}) == 1
    finally:
        for each in made:
            each.close()


def test_an_address_that_the_machine_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved(monkeypatch, NOT_HERE, V4)
    (made,) = bind("here", 0)
    assert made.getsockname()[0] == "127.0.0.1"
    made.close()
    resolved(monkeypatch, NOT_HERE)
    with pytest.raises(ConfigError, match=r"can't listen on elsewhere:0: Cannot assign"):
        bind("elsewhere", 0)


def test_a_port_that_is_taken_at_one_of_the_addresses_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        resolved(monkeypatch, (*V6[:4], ("::1", port, 0, 0)), (*V4[:4], ("127.0.0.1", port)))
        with pytest.raises(ConfigError, match=f"can't listen on localhost:{port}: Address already"):
            bind("localhost", port)
