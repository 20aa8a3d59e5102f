"""Deleted blocks come back from no tier, also after a restart of the node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.core.errors import CacheError
from kvtier.node.wire import protocol
from kvtier.node.wire.protocol import ABSENT, ARRIVING, MEMORY, MISSING, STORAGE
from tests.kit.nodes import NodeProcess, running
from tests.kit.servers import ValkeyServer
from tests.kit.waiting import wait_until
from tests.node.control_harness import BLOCK_BYTES, BareEngine, hexed, key


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    folder = tmp_path / "valkey"
    folder.mkdir()
    server = ValkeyServer(folder)
    yield server
    server.close()


def options(tmp_path: Path, valkey: ValkeyServer) -> list[str]:
    return [
        f"--disk-path={tmp_path / 'disk'}",
        f"--disk-capacity={64 * BLOCK_BYTES}",
        f"--storage=valkey://127.0.0.1:{valkey.port}",
    ]


def stored(node: NodeProcess, num: int, *tiers: str) -> bool:
    """Return whether these tiers have ``num`` blocks each."""
    used = node.room()["used_bytes"]
    return all(used[tier] == num * BLOCK_BYTES for tier in tiers)


def test_keys_are_deleted_from_every_tier_and_stay_deleted(
    tmp_path: Path, valkey: ValkeyServer
) -> None:
    with running(tmp_path, *options(tmp_path, valkey)) as node:
        with BareEngine(node) as engine:
            engine.store(1, 2, 3, 4)
            wait_until(lambda: stored(node, 4, "disk", "valkey"), "it was never written")
            wait_until(lambda: valkey.num_values == 4, "it was never written")
            assert engine.delete(1, 2) == [MISSING, MISSING]
            assert engine.places(1, 2, 3, 4) == [ABSENT, ABSENT, MEMORY, MEMORY]
            told = node.control.post("/delete", keys=hexed(3, 9))
            assert told["is_complete"]
            assert told["blocks"] == 2
            assert engine.places(3, 4) == [ABSENT, MEMORY]
            assert valkey.num_values == 1
        node.kill()
        node.start()
        with BareEngine(node) as engine:
            assert engine.fetch(4) == [4]
            for number in 1, 2, 3:
                assert engine.fetch(number) == [None]


def test_blocks_that_only_storage_knows_are_deleted(tmp_path: Path, valkey: ValkeyServer) -> None:
    with running(tmp_path, *options(tmp_path, valkey)) as node:
        with BareEngine(node) as engine:
            engine.store(1, 2, 3)
            wait_until(lambda: stored(node, 3, "disk", "valkey"), "it was never written")
            wait_until(lambda: valkey.num_values == 3, "it was never written")
        node.lose()
        node.start()
        with BareEngine(node) as engine:
            assert stored(node, 0, "host", "disk", "valkey"), "the index knows nothing yet"
            assert engine.delete(1, 2) == [MISSING, MISSING]
            assert valkey.num_values == 1
            assert engine.fetch(1) == [None]
        node.lose()
        node.start()
        with BareEngine(node) as engine:
            assert engine.fetch(2) == [None]
            assert engine.fetch(3) == [3]


@pytest.mark.slow
def test_a_room_is_deleted_with_what_only_its_slab_and_its_store_know(
    tmp_path: Path, valkey: ValkeyServer
) -> None:
    with running(tmp_path, *options(tmp_path, valkey)) as node:
        with BareEngine(node, "team-a", "a") as engine, BareEngine(node, "team-b", "b") as other:
            engine.store(1, 2, 3)
            other.store(1)
            wait_until(lambda: valkey.num_values == 4, "it was never written")
        node.lose()
        node.start()
        room = node.room("team-a")
        assert not room["is_open"]
        told = node.control.post("/delete", room=room["name"])
        assert told["is_complete"], told
        assert valkey.num_values == 1, "the other tenant's"
        node.lose()
        node.start()
        with BareEngine(node, "team-a", "a") as engine, BareEngine(node, "team-b", "b") as other:
            assert [engine.fetch(number) for number in (1, 2, 3)] == [[None]] * 3
            assert other.fetch(1) == [1]


def test_blocks_in_use_are_not_found_and_freed_when_they_are_released(tmp_path: Path) -> None:
    disk = [f"--disk-path={tmp_path / 'disk'}", "--disk-capacity=4MiB"]
    with (
        running(tmp_path, *disk) as node,
        BareEngine(node) as engine,
        BareEngine(node, name="other") as other,
    ):
        engine.store(1)
        wait_until(lambda: stored(node, 1, "disk"), "it was never written")
        leased = engine.lease(1)
        (reserved,) = engine.reserve([key(2)])
        assert other.delete(1, 2) == [MISSING, MISSING]
        assert other.places(1, 2) == [ABSENT, ABSENT]
        assert node.room()["used_bytes"]["host"] == 2 * BLOCK_BYTES
        assert (engine.block(protocol.unpack(leased)[0]) == 1).all(), "it is still being read"
        engine.block(reserved)[:] = 2
        engine.commit([reserved])
        assert other.places(2) == [ABSENT]
        engine.release(leased)
        wait_until(lambda: stored(node, 0, "host", "disk"), "it was never freed")
        engine.store(1, 2)
        assert other.places(1, 2) == [MEMORY, MEMORY], "new blocks may have these keys"


def test_a_store_that_is_down_keeps_a_deletion_from_being_complete(
    tmp_path: Path, valkey: ValkeyServer
) -> None:
    store = f"--storage=valkey://127.0.0.1:{valkey.port}"
    with running(tmp_path, store) as node, BareEngine(node) as engine:
        engine.store(1)
        wait_until(lambda: stored(node, 1, "valkey"), "it was never written")
        valkey.stop()
        told = node.control.post("/delete", keys=hexed(1), timeout_s=1.0)
        assert not told["is_complete"]
        assert "storage has not confirmed" in told["problems"][0]
        assert engine.places(1) == [ABSENT], "nothing finds it meanwhile"
        valkey.start()
        wait_until(
            lambda: node.control.post("/delete", keys=hexed(1))["is_complete"],
            "it was never confirmed",
        )


def slow(valkey: ValkeyServer) -> str:
    """Return the option of a store that takes a second for two blocks."""
    return f"--storage=valkey://127.0.0.1:{valkey.port}?bytes_per_s={2 * BLOCK_BYTES}"


@pytest.mark.parametrize("whole_room", [False, True])
def test_a_read_in_flight_brings_nothing_back(
    tmp_path: Path, valkey: ValkeyServer, whole_room: bool
) -> None:
    with running(tmp_path, slow(valkey)) as node:
        with BareEngine(node) as engine:
            engine.store(1, 2)
            wait_until(lambda: valkey.num_values == 2, "it was never written")
        node.lose()
        node.start()
        with BareEngine(node) as engine:
            wait_until(lambda: engine.places(1, 2) == [STORAGE, STORAGE], "it was never found")
            assert engine.promote(1, 2) == 2
            assert engine.places(1, 2) == [ARRIVING, ARRIVING]
            body = {"room": node.room()["name"]} if whole_room else {"keys": hexed(1, 2)}
            assert node.control.post("/delete", **body)["is_complete"]
            assert engine.places(1, 2) == [ABSENT, ABSENT]
            assert valkey.num_values == 0
            assert stored(node, 0, "host", "valkey")


@pytest.mark.parametrize("whole_room", [False, True])
def test_a_write_in_flight_leaves_nothing(
    tmp_path: Path, valkey: ValkeyServer, whole_room: bool
) -> None:
    with running(tmp_path, slow(valkey)) as node, BareEngine(node) as engine:
        engine.store(1, 2)
        assert engine.places(1, 2) == [MEMORY, MEMORY]
        body = {"room": node.room()["name"]} if whole_room else {"keys": hexed(1, 2)}
        assert node.control.post("/delete", **body)["is_complete"]
        assert valkey.num_values == 0
        assert stored(node, 0, "host", "valkey")
        assert engine.places(1, 2) == [ABSENT, ABSENT]


def test_what_does_not_exist_is_no_success(tmp_path: Path) -> None:
    with running(tmp_path) as node:
        with pytest.raises(CacheError, match="no room is called 'nobody'"):
            node.control.post("/delete", room="nobody")
        with pytest.raises(CacheError, match="a room or a tenant"):
            node.control.post("/delete")
        with pytest.raises(CacheError, match="tenant 'nobody' has no room"):
            node.control.post("/delete", tenant="nobody")
