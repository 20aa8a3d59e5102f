"""Blocks in a real Mooncake Store."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.types import BlockKey
from kvtier.testing.storage_user import User, stored_key
from kvtier.tiers import Outcome, StorageTier
from tests.kit.servers import MooncakeMaster, free_port, has_mooncake
from tests.kit.waiting import wait_until
from tests.tiers.remote.store_tests import (
    CodedStoreTests,
    Place,
    StoreSuite,
    StoreTests,
    open_store,
)

pytestmark = pytest.mark.skipif(
    has_mooncake() is None, reason="no Mooncake: make test-stores installs it"
)

THERE, ABSENT, DAMAGED, FAILED = Outcome


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    made = MooncakeMaster(tmp_path_factory.mktemp("mooncake"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def store(master: MooncakeMaster) -> Iterator[Any]:
    """The store's own client, for changes past a tier."""
    made = client_of(master)
    yield made
    made.close()


def client_of(master: MooncakeMaster) -> Any:
    from mooncake.store import MooncakeDistributedStore

    made = MooncakeDistributedStore()
    code = made.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master.address)
    assert code == 0
    return made


def open_tier(address: str, prefix: str, num_blocks: int = 64, **options: Any) -> StorageTier:
    return open_store(f"mooncake://{address}", num_blocks, prefix=f"{prefix}:", **options)


def docks(tier: StorageTier) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(f"kvtier {tier.name}")]


class MooncakePlace(Place):
    @pytest.fixture(autouse=True)
    def _store(self, master: MooncakeMaster, store: Any) -> None:
        self.master, self.store = master, store

    def open_tier(
        self, place: str, num_blocks: int = 64, *shape: Any, **options: Any
    ) -> StorageTier:
        url = f"mooncake://{self.master.address}"
        return open_store(url, num_blocks, *shape, prefix=f"{place}:", **options)

    def value(self, place: str, key: BlockKey) -> bytes:
        return bytes(self.store.get(f"{place}:{key.hex()}"))

    def replace(self, place: str, key: BlockKey, content: bytes) -> None:
        name = f"{place}:{key.hex()}"
        self.store.remove(name, True)
        assert self.store.put(name, content or b"\0") == 0  # it stores no empty values


class TestMooncakeTier(MooncakePlace, StoreSuite):
    def hang(self, storage: StorageTier) -> AbstractContextManager[None]:
        return self.master.frozen()

    @pytest.mark.slow
    @pytest.mark.timeout(1800)  # a second for each time that Mooncake's client is closed
    def test_agrees_with_a_dictionary(self) -> None:
        super().test_agrees_with_a_dictionary()


class TestMooncake(MooncakePlace, StoreTests):
    pass


class TestCoded(MooncakePlace, CodedStoreTests):
    num_changes = 120


# -- a store that fails ----------------------------------------------------------------------------


@pytest.mark.slow
def test_store_that_dies_and_comes_back(tmp_path: Path) -> None:
    master = MooncakeMaster(tmp_path)
    tier = open_tier(master.address, "mortal")
    user = User(tier, timeout_s=2.0)
    assert user.put(1) == [THERE]
    master.stop()
    assert user.get(1)[0] in (FAILED, ABSENT)
    assert user.put(2) == [FAILED]
    assert user.find(1) == [FAILED]
    master.start()
    wait_until(lambda: user.put(1) == [THERE])
    wait_until(lambda: user.get(1) == [THERE])
    tier.close()
    master.close()


@pytest.mark.slow
def test_store_that_dies_in_mid_transfer(tmp_path: Path) -> None:
    master = MooncakeMaster(tmp_path)
    tier = open_tier(master.address, "middle", 10_000)
    user = User(tier, timeout_s=5.0)
    assert user.put(*range(2000)) == [THERE] * 2000
    death = threading.Timer(0.05, master.stop)
    death.start()
    outcomes: list[Outcome] = []
    while death.is_alive():
        outcomes += user.get(*range(2000))  # which compares every byte of the found blocks
    death.join()
    outcomes += user.get(*range(2000))
    assert {*outcomes} <= {THERE, FAILED, ABSENT}
    assert FAILED in outcomes
    tier.close()
    wait_until(lambda: not docks(tier), "those that were in a call have ended, too")


@pytest.mark.slow
def test_store_that_answers_nobody_gives_what_it_had_later(tmp_path: Path) -> None:
    master = MooncakeMaster(tmp_path)
    tier = open_tier(master.address, "hole", readers=2, writers=1)
    user = User(tier, timeout_s=0.2)
    assert User(tier).put(*range(4)) == [THERE] * 4
    with master.frozen():
        began = time.monotonic()
        for _ in range(10):  # more than there are docks
            assert user.get(*range(4)) == [FAILED] * 4
            assert user.put(7) == user.find(0) == [FAILED]
        assert time.monotonic() - began < 10 * 3 * 1.0
    wait_until(lambda: user.find(0) != [FAILED])
    wait_until(lambda: User(tier).put(0) == [THERE])
    assert User(tier).get(0) == [THERE]
    tier.close()
    master.close()


@pytest.mark.slow
def test_master_that_is_not_there_can_come_later(tmp_path: Path) -> None:
    tier = open_tier(f"127.0.0.1:{free_port()}", "later")
    assert "not " in tier.findings()[0].found
    assert User(tier, timeout_s=0.5).get(1) == [FAILED]
    wait_until(lambda: "has not answered" in tier.findings()[0].found)
    tier.close()


def test_master_that_takes_connections_and_says_nothing_holds_nobody_up() -> None:
    """Mooncake's client would block every thread of this process."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = open_tier(f"127.0.0.1:{silent.getsockname()[1]}", "silent")
        assert "no answer" in tier.findings()[0].found
        assert User(tier, timeout_s=0.5).get(1) == [FAILED]
        wait_until(lambda: "has not answered" in tier.findings()[0].found)
        tier.close()


def test_store_without_memory_says_so(tmp_path: Path) -> None:
    master = MooncakeMaster(tmp_path, lent_bytes=0)
    tier = open_tier(master.address, "poor")
    assert "no memory" in tier.findings()[0].found
    assert User(tier, timeout_s=1.0).put(1) == [FAILED]
    tier.close()
    tier = open_tier(master.address, "poor", segment_bytes="64MiB")
    assert "answers" in tier.findings()[0].found
    assert User(tier).put(1) == User(tier).get(1) == [THERE]
    tier.close()
    master.close()


@pytest.mark.slow
def test_full_store_makes_room_and_is_never_wrong(tmp_path: Path) -> None:
    master = MooncakeMaster(tmp_path, lent_bytes=16 << 20, lease_ms=50)
    wrong: list[str] = []
    seen: set[Outcome] = set()

    def work(seed: int) -> None:
        tier = open_tier(master.address, "crowd", 1 << 20)
        user = User(tier)
        for turn in range(40):
            first = (seed + turn) * 4001 % 200_000
            user.put(*range(first, first + 400))
            try:
                seen.update(user.get(*range(first - 400, first + 400)))
            except AssertionError as error:
                wrong.append(str(error))
        tier.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 1, 2, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert {THERE, ABSENT} <= seen, "nothing had to go: the test is too small"
    master.close()


# -- names -----------------------------------------------------------------------------------------


def test_key_of_the_store_is_the_prefix_and_the_block_key_in_hex(store: Any, master: Any) -> None:
    tier = open_tier(master.address, "named")
    assert User(tier).put(3) == [THERE]
    assert store.is_exist(f"named:{stored_key(3).hex()}") == 1
    tier.close()


# -- replicas --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("model", ["random-gqa", "random-mla"])
def test_another_process_loads_what_one_has_computed(
    master: MooncakeMaster, tmp_path: Path, model: str
) -> None:
    pytest.importorskip("transformers", reason="the embedded engine is not installed")
    from tests.tiers.remote.replica import check_two_replicas

    check_two_replicas(model, f"mooncake://{master.address}?prefix={model}:", tmp_path)
