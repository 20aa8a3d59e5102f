"""Opening of a partition's storage, which takes long: other partitions are served meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread
from unittest.mock import patch

import pytest

from kvtier.core.errors import CacheError, TierError
from kvtier.devices.cpu import CpuDevice
from kvtier.node.server.node import CacheNode
from kvtier.node.server.opening import PartitionOpener
from kvtier.node.server.partition_key import PartitionKey
from kvtier.node.server.stores import partition_location
from kvtier.node.wire import protocol
from kvtier.tiers import StorageTier
from kvtier.tiers.disk import DiskTier
from tests.kit.waiting import wait_until
from tests.node.harness import PATIENCE_S, LocalNode, bare, config_of, keys, local_node
from tests.node.test_engines import places, store


class Disk:
    """Holds the opening of some partitions' storage until a test allows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_open = Event()
        self.opened: list[StorageTier] = []
        self.num_begun = 0
        self.fails = False
        plain = CacheNode.open_storages

        def slow(node: CacheNode, key: PartitionKey) -> Mapping[str, StorageTier]:
            if key.scope == b"slow":
                self.num_begun += 1
                assert self.may_open.wait(PATIENCE_S)
                if self.fails:
                    raise TierError("disk", "open", "it is broken")
            made = plain(node, key)
            self.opened += made.values()
            return made

        monkeypatch.setattr(CacheNode, "open_storages", slow)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_other_partitions_are_served_while_one_opens(tmp_path: Path, disk: Disk) -> None:
    options = {"disk_path": str(tmp_path / "disk"), "disk_capacity": "1MiB"}
    with (
        local_node(tmp_path, **options) as node,
        bare(node.config.socket) as slow,
        bare(node.config.socket) as second,
        bare(node.config.socket) as other,
    ):
        slow.attach("slow"), second.attach("second")
        for engine in slow, second:
            engine.send(protocol.OpenRequest(2, b"slow", 16 << 10, 8))
        wait_until(lambda: disk.num_begun)
        partition = other.enter("other")
        store(other, partition, keys(1))
        assert places(other, partition, keys(1)) == [protocol.MEMORY]
        assert disk.num_begun == 1, "it is opened once"
        disk.may_open.set()
        for engine in slow, second:
            answer = engine.receive()
            assert isinstance(answer, protocol.OpenAnswer)
            store(engine, answer.partition, keys(2))
            assert places(engine, answer.partition, keys(2)) == [protocol.MEMORY]
        assert len(disk.opened) == 2


def test_partition_that_fails_to_open_is_refused_and_tried_again(
    tmp_path: Path, disk: Disk
) -> None:
    disk.fails = True
    disk.may_open.set()
    with local_node(tmp_path) as node, bare(node.config.socket) as engine:
        engine.attach()
        for _ in range(2):
            told = engine.ask(protocol.OpenRequest(2, b"slow", 16 << 10, 8))
            assert "it is broken" in told.reason
        disk.fails = False
        told = engine.ask(protocol.OpenRequest(2, b"slow", 16 << 10, 8))
        assert isinstance(told, protocol.OpenAnswer)


def test_partition_that_gets_no_memory_closes_its_disk_and_is_tried_again(
    tmp_path: Path, disk: Disk
) -> None:
    options = {"disk_path": str(tmp_path / "disk"), "disk_capacity": "1MiB"}
    request = protocol.OpenRequest(2, b"engine", 16 << 10, 8)
    with local_node(tmp_path, **options) as node, bare(node.config.socket) as engine:
        engine.attach()
        full = patch.object(CacheNode, "enter", side_effect=CacheError("no room for its records"))
        closes = patch.object(DiskTier, "close", autospec=True, side_effect=DiskTier.close)
        with full, closes as closed:
            assert "no room for its records" in engine.ask(request).reason
            closed.assert_called_once_with(disk.opened[0])
        assert isinstance(engine.ask(request), protocol.OpenAnswer)


def test_an_opening_that_finds_no_thread_is_tried_again(tmp_path: Path) -> None:
    async def opens_again() -> None:
        node = CacheNode(config_of(tmp_path), CpuDevice())
        opener, key = PartitionOpener(node), PartitionKey("default", b"a", 16 << 10, 8)
        try:
            full = patch.object(Thread, "start", side_effect=RuntimeError("can't start"))
            with full, pytest.raises(RuntimeError):
                await opener.open(key)
            await asyncio.wait_for(opener.open(key), PATIENCE_S)
        finally:
            await opener.close()
            node.close()

    asyncio.run(opens_again())


def test_storage_that_opens_after_the_node_has_ended_is_closed(tmp_path: Path, disk: Disk) -> None:
    options = {"disk_path": str(tmp_path / "disk"), "disk_capacity": "1MiB"}
    node = LocalNode(config_of(tmp_path, **options))
    with bare(node.config.socket) as engine:
        engine.attach()
        engine.send(protocol.OpenRequest(2, b"slow", 16 << 10, 8))
        wait_until(lambda: disk.num_begun)
        closing = Thread(target=node.close)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive(), "the node waits for no disk"
    disk.may_open.set()
    with local_node(tmp_path / "next", **options) as other, bare(other.config.socket) as engine:
        engine.attach()
        request = protocol.OpenRequest(2, b"slow", 16 << 10, 8)
        wait_until(lambda: isinstance(engine.ask(request), protocol.OpenAnswer))


@pytest.mark.parametrize(
    ("location", "place"),
    [
        ("s3://bucket/kv?poll_s=1", "s3://bucket/kv/a%20room?poll_s=1"),
        ("gs://bucket", "gs://bucket/a%20room"),
        ("far=az://container/kv", "far=az://container/kv/a%20room"),
        ("valkey://host?prefix=x:", "valkey://host?prefix=x%3Aa+room%3A"),
        ("dir:///mnt/kv?capacity=2TiB", "dir:///mnt/kv?capacity=2TiB"),
    ],
)
def test_each_room_has_a_place_of_its_own_where_blocks_are_listed(
    location: str, place: str
) -> None:
    assert partition_location(location, "a room") == place
