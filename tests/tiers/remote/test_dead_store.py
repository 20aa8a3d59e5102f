"""Log lines of a store that is disabled after failures."""

from __future__ import annotations

import logging

import pytest

from kvtier.cache.transfer.local import FAILURES_UNTIL_OPEN, LocalMover
from kvtier.testing.storage_user import stored_key
from tests.kit.servers import free_port
from tests.tiers.remote.valkeys import open_tier


def test_log_says_why_a_store_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    tier = open_tier(free_port(), "dead", bytes_per_s="1GiB")
    mover = LocalMover({"valkey": tier}, None)
    with caplog.at_level(logging.WARNING):
        for _ in range(FAILURES_UNTIL_OPEN):
            assert mover.find("valkey", [stored_key(1)]).wait(30)
    expected = "storage calls are paused lane=valkey find error='Connection refused'"
    assert expected in caplog.text
    mover.close(10)
    tier.close()
