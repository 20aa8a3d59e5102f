"""Disk space of tenants: floors and ceilings of slabs, and a tenant that floods the disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.core.errors import ConfigError
from kvtier.core.types import DISK
from kvtier.devices.cpu import CpuDevice
from kvtier.node.config import NodeConfig, TenantQuota, parse_quotas
from kvtier.node.server import memory
from kvtier.node.server import node as node_module
from kvtier.node.server.disk_space import LEAST_BLOCKS, DiskSpace
from kvtier.node.server.node import CacheNode
from kvtier.node.server.partition import Partition
from kvtier.node.server.partition_key import PartitionKey
from kvtier.tiers import StorageTier
from tests.node.harness import BLOCK, SEGMENT, config_of, keys, opened

MIB = 1 << 20


@contextmanager
def node_with(folder: Path, **quotas: TenantQuota) -> Iterator[CacheNode]:
    """A node with 4 MiB of disk space, of which one slab takes 2 MiB at most."""
    config = config_of(
        folder,
        disk_path=str(folder / "disk"),
        disk_capacity="2MiB",
        disk_total="4MiB",
        quotas=quotas,
    )
    node = CacheNode(config, CpuDevice())
    try:
        yield node
        node.check_invariants()
    finally:
        node.close()


def partition_of(node: CacheNode, tenant: str, number: int = 0) -> Partition:
    scope = bytes([number]) * 32
    return opened(node, PartitionKey(tenant, scope, BLOCK, 8))[1]


def slab_bytes(node: CacheNode, folder: Path, tenant: str) -> int:
    """Return what a tenant's slabs take, as files and as the node counts them."""
    found = sum(each.stat().st_size for each in (folder / "disk").glob(f"{tenant}-*/data.slab"))
    assert node.disk_space.held_by(tenant) == found
    return found


def store(node: CacheNode, partition: Partition, *numbers: int) -> None:
    """Store blocks, and wait until they are on disk."""
    for number in numbers:
        reserved = partition.reserve([keys(number)])
        if reserved is not None and reserved.keys:
            partition.cache.commit(reserved.keys, [0])
    end_s = time.monotonic() + 20
    while partition.has_work and time.monotonic() < end_s:
        partition.poll()
        time.sleep(0.001)
    node.poll()


def on_disk(partition: Partition) -> int:
    return partition.used_bytes_by_tier().get(DISK, 0) // BLOCK


def test_tenant_that_floods_the_disk_leaves_the_others_their_floor(tmp_path: Path) -> None:
    with node_with(tmp_path, b=TenantQuota(4 * SEGMENT, disk_floor=MIB)) as node:
        hostile = [partition_of(node, "a", number) for number in range(6)]
        assert slab_bytes(node, tmp_path, "a") == 3 * MIB
        store(node, hostile[0], *range(300))
        late = partition_of(node, "b")
        assert slab_bytes(node, tmp_path, "b") == MIB
        store(node, late, *range(16))
        num = on_disk(late)
        assert num == 16
        for partition in hostile:
            store(node, partition, *range(1000, 1200))
        assert on_disk(late) == num
        assert slab_bytes(node, tmp_path, "a") == 3 * MIB
        assert DISK not in hostile[-1].used_bytes_by_tier(), "it is served without the disk"


def test_tenant_gets_no_more_than_its_ceiling(tmp_path: Path) -> None:
    with node_with(tmp_path, a=TenantQuota(disk_ceiling=MIB)) as node:
        partition_of(node, "a"), partition_of(node, "a", 1)
        assert slab_bytes(node, tmp_path, "a") == MIB
        partition_of(node, "b")
        assert slab_bytes(node, tmp_path, "b") == 2 * MIB
        node.set_quota("a", TenantQuota(disk_ceiling=3 * MIB))
        partition_of(node, "a", 2)
        assert slab_bytes(node, tmp_path, "a") == 2 * MIB, "what is left"


def test_slab_keeps_its_size_over_restarts(tmp_path: Path) -> None:
    with node_with(tmp_path, a=TenantQuota(disk_ceiling=MIB)) as node:
        store(node, partition_of(node, "a"), *range(8))
    with node_with(tmp_path) as node:
        assert slab_bytes(node, tmp_path, "a") == MIB
        partition = partition_of(node, "a")
        partition.lookup([keys(number) for number in range(8)])
        assert on_disk(partition) == 8
        assert slab_bytes(node, tmp_path, "a") == MIB


def test_space_of_a_slab_that_can_not_be_made_is_free_again(tmp_path: Path) -> None:
    space = DiskSpace(str(tmp_path), MIB, MIB, dict)
    key = PartitionKey("a", b"s", BLOCK, 8)
    with space.slab_of(key) as size:
        assert size == MIB
        with space.slab_of(PartitionKey("b", b"s", BLOCK, 8)) as other:
            assert other == 0
    with space.slab_of(PartitionKey("b", b"s", BLOCK, 8)) as other:
        assert other == MIB
    with space.slab_of(PartitionKey("b", b"s", MIB // LEAST_BLOCKS + 1, 8)) as other:
        assert other == 0, "it would have too few blocks"


def test_slab_that_can_not_be_read_stops_no_node(tmp_path: Path) -> None:
    key = PartitionKey("a", bytes(32), BLOCK, 8)
    folder = tmp_path / "disk" / key.folder
    folder.mkdir(parents=True)
    (folder / "data.slab").symlink_to(folder / "data.slab")
    with node_with(tmp_path) as node:
        assert DISK not in partition_of(node, "a").used_bytes_by_tier()


@pytest.mark.parametrize(
    ("block_bytes", "sentence"), [(SEGMENT + 1, "does not fit"), (1, "too small")]
)
def test_partition_that_is_refused_takes_no_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, sentence: str
) -> None:
    monkeypatch.setattr(memory, "MAX_SLOTS", 1 << 19)
    with node_with(tmp_path) as node:
        with pytest.raises(ConfigError, match=sentence):
            opened(node, PartitionKey("a", bytes(32), block_bytes, 8))
        assert slab_bytes(node, tmp_path, "a") == 0
        assert not list((tmp_path / "disk").glob("*"))


def test_partition_that_a_store_refuses_takes_no_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> StorageTier:
        raise ConfigError("no such bucket")

    monkeypatch.setattr(node_module, "make_storage", refuse)
    config = config_of(tmp_path, disk_path=str(tmp_path / "disk"), storage=["s3://bucket"])
    node = CacheNode(config, CpuDevice())
    with pytest.raises(ConfigError, match="no such bucket"):
        partition_of(node, "a")
    assert not list(tmp_path.glob("disk/*"))
    node.close()


def test_floors_on_disk_need_a_total_that_they_fit_into() -> None:
    quotas = parse_quotas(["a=1MiB"], ["a=2MiB:3MiB", "b=:1MiB"])
    assert quotas == {
        "a": TenantQuota(MIB, None, 2 * MIB, 3 * MIB),
        "b": TenantQuota(0, None, 0, MIB),
    }
    with pytest.raises(ConfigError, match="needs disk_total"):
        NodeConfig(quotas=quotas)
    with pytest.raises(ConfigError, match="add up to 2097152 bytes, and disk_total is 1048576"):
        NodeConfig(quotas=quotas, disk_total="1MiB")
    NodeConfig(quotas=quotas, disk_total="2MiB")
    with pytest.raises(ConfigError, match="above the ceiling"):
        parse_quotas([], ["a=3MiB:2MiB"])
