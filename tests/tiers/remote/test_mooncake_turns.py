"""Number of concurrent calls of Mooncake's client; the client is a stand-in."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError, Event, Lock

import pytest

from kvtier.core.types import BlockKey
from kvtier.testing.storage_suite import GROUP
from kvtier.tiers import Outcome
from kvtier.tiers.codecs.frame import MAX_OVERHEAD
from kvtier.tiers.remote.bounce_workers import Arrived, BounceRows
from kvtier.tiers.remote.envelope import HEADER_BYTES
from kvtier.tiers.remote.location import read_location
from kvtier.tiers.remote.mooncake import tier
from kvtier.tiers.remote.mooncake.tier import MooncakeClient, MooncakeOptions, StoreProcess

KEY = BlockKey(bytes(32))
PATIENCE_S = 60.0
VALUE_BYTES = HEADER_BYTES + GROUP.bytes_per_block + MAX_OVERHEAD


class Store:
    """Reports every block as moved. meet: barrier at which reads wait for each other."""

    def __init__(self, meet: Barrier) -> None:
        self.num_written = 0
        self._lock = Lock()
        self._meet = meet

    def register_buffer(self, address: int, num_bytes: int) -> int:
        return 0

    def batch_get_into(self, names: list[str], begins: list[int], sizes: list[int]) -> list[int]:
        self._meet.wait()
        return sizes

    def batch_put_from(
        self, names: list[str], begins: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        with self._lock:
            self.num_written += len(names)
        return [0] * len(names)


class Clients:
    """Clients of one process with so many cores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int, store: Store) -> None:
        monkeypatch.setattr(tier, "num_cores", lambda: cores)
        location = read_location("mooncake", "//127.0.0.1:1")
        self.process = StoreProcess(location, MooncakeOptions())
        self._store = store

    def read(self) -> list[Arrived]:
        return self._make().read([KEY], self._rows().begins[:1])

    def write(self, is_wanted: bool) -> list[Outcome]:
        return self._make().write([KEY], self._rows().begins[:1], [VALUE_BYTES], lambda: is_wanted)

    def _make(self) -> MooncakeClient:
        return MooncakeClient(self.process, self._store, "", self._rows())

    def _rows(self) -> BounceRows:
        return BounceRows(1, GROUP.bytes_per_block)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call proceeds before it gets a turn."""
    monkeypatch.setattr(tier, "TURN_S", PATIENCE_S)


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize(("cores", "at_a_time"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (64, 4)])
def test_half_the_cores_move_blocks_at_a_time_and_four_at_most(
    monkeypatch: pytest.MonkeyPatch, cores: int, at_a_time: int
) -> None:
    together = Store(Barrier(at_a_time, timeout=PATIENCE_S))
    clients = Clients(monkeypatch, cores, together)
    with ThreadPoolExecutor(2 * at_a_time) as pool:
        reads = [pool.submit(clients.read) for _ in range(2 * at_a_time)]
        assert [read.result() for read in reads] == [[VALUE_BYTES]] * len(reads)
    one_more = Store(Barrier(at_a_time + 1, timeout=0.2))
    clients = Clients(monkeypatch, cores, one_more)
    with ThreadPoolExecutor(at_a_time + 1) as pool:
        reads = [pool.submit(clients.read) for _ in range(at_a_time + 1)]
        for read in reads:
            with pytest.raises(BrokenBarrierError):
                read.result()


def test_a_call_that_hangs_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "TURN_S", 0.01)
    clients = Clients(monkeypatch, 2, Store(Barrier(1)))
    has_begun, may_end = Event(), Event()

    def hang() -> None:
        with clients.process.turn():
            has_begun.set()
            may_end.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(hang)
        assert has_begun.wait(PATIENCE_S)
        assert clients.read() == [VALUE_BYTES]
        assert not hung.done()
        may_end.set()


@pytest.mark.usefixtures("endless")
def test_a_turn_without_one_gives_none_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "num_cores", lambda: 2)
    process = StoreProcess(read_location("mooncake", "//127.0.0.1:1"), MooncakeOptions())
    with process.turn():
        monkeypatch.setattr(tier, "TURN_S", 0.01)
        with process.turn():
            pass
        assert not process._turns.acquire(blocking=False)
    assert process._turns.acquire(blocking=False)


def test_what_is_not_wanted_when_its_turn_comes_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store(Barrier(1))
    clients = Clients(monkeypatch, 2, store)
    assert clients.write(is_wanted=False) == [Outcome.FAILED]
    assert store.num_written == 0
    assert clients.write(is_wanted=True) == [Outcome.THERE]
    assert store.num_written == 1


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_a_thread_that_polls_gives_way_and_the_clients_own_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = StoreProcess(read_location("mooncake", "//127.0.0.1:1"), MooncakeOptions())
    ours = os.getpriority(os.PRIO_PROCESS, os.getpid())
    at_set_up = []

    def set_up(_: StoreProcess) -> Store:
        at_set_up.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return Store(Barrier(1))

    def polls() -> int:
        process.client(BounceRows(1, GROUP.bytes_per_block))
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    monkeypatch.setattr(StoreProcess, "_set_up", set_up)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(polls).result() == min(19, ours + tier.GIVES_WAY)
        assert pool.submit(polls).result() == min(19, ours + tier.GIVES_WAY)
    assert at_set_up == [ours]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == ours
