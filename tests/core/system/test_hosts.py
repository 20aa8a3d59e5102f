"""Addresses of this machine, in all the forms in which they are written."""

from __future__ import annotations

import pytest

from kvtier.core.system.hosts import is_local

LOCAL = (
    *("localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.9.8.7", "127.1", "2130706433"),
    *("::1", "::ffff:127.0.0.1", "0.0.0.0", "::"),
)


@pytest.mark.parametrize("host", LOCAL)
def test_loopback_is_local_however_it_is_written(host: str) -> None:
    assert is_local(host)


@pytest.mark.parametrize(
    "host", ["", "10.0.0.1", "example.org", "127.0.0.1.example.org", "localhost.example.org", "::2"]
)
def test_other_hosts_are_not_local(host: str) -> None:
    assert not is_local(host)
