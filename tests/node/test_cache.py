"""The client that stands in place of a keyed cache, with a real node."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import current_thread
from threading import enumerate as enumerate_threads
from typing import Any

import pytest

from kvtier.cache.block_cache import BlockState
from kvtier.core.types import DISK, HOST
from kvtier.node.client.cache import NodeCache
from kvtier.node.client.channel import Channel, NodeClient
from kvtier.plan.worth import is_worth_loading
from tests.kit.nodes import NodeProcess, running
from tests.kit.waiting import wait_until
from tests.node.harness import node_cache

BLOCK_BYTES = 4096
SCOPE = b"s" * 32
KEYS = [bytes([number]) * 36 for number in range(8)]
NOWHERE, MEMORY, STORAGE = BlockState.NOWHERE, BlockState.MEMORY, BlockState.STORAGE

Make = Callable[..., NodeCache]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    sizes = ("--host-capacity=64KiB", "--segment-capacity=16KiB")
    disk = (f"--disk-path={tmp_path / 'disk'}", "--disk-capacity=1MiB")
    with running(tmp_path, *sizes, *disk) as made:
        yield made


@pytest.fixture
def make(node: NodeProcess) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(scope: bytes = SCOPE, clock: Callable[[], float] = time.monotonic) -> NodeCache:
            cache = node_cache(node.socket, scope, BLOCK_BYTES, clock=clock)
            stack.callback(cache.close)
            return cache

        yield made


def _journal_bytes(disk: Path) -> int:
    """Return the size of the journals: the header, a record for the namespace, and per block."""
    return sum(each.stat().st_size for each in disk.rglob("journal"))


def _store(cache: NodeCache, keys: list[bytes]) -> None:
    cache.on_request(keys)
    partition = cache.reserve(keys)
    assert partition is not None
    cache.commit(partition.keys, list(range(len(partition.keys))))


def test_block_is_visible_to_others_once_it_is_committed(make: Make) -> None:
    one, other = make(), make()
    partition = one.reserve(KEYS[:2])
    assert partition is not None
    assert partition.keys == KEYS[:2]
    assert set(other.lookup(KEYS[:2]).states) <= {BlockState.ARRIVING}
    one.commit(KEYS[:1], [0])
    one.abort(KEYS[1:2])
    one.lookup(KEYS[2:3])  # an answer: the notices were read
    assert other.lookup(KEYS[:2]).states == [MEMORY, NOWHERE]


def test_engines_of_other_namespaces_share_nothing(make: Make) -> None:
    one, other = make(), make(b"o" * 32)
    _store(one, KEYS[:2])
    assert one.lookup(KEYS[:2]).states == [MEMORY, MEMORY]
    assert other.lookup(KEYS[:2]).states == [NOWHERE, NOWHERE]


def test_found_blocks_stay_until_the_next_poll(make: Make) -> None:
    """Sixteen slots: without the leases of the look-up the blocks would be evicted."""
    one, other = make(), make()
    _store(one, KEYS[:4])
    assert one.lookup(KEYS[:4]).states == [MEMORY] * 4
    for number in range(8):
        other.reserve([bytes([100 + 4 * number + at]) * 36 for at in range(4)])
        other.end_copies()
        other.copies_have_ended()
    held = one.hold(KEYS[:4])
    assert len(set(held.slots)) == 4
    assert held.guard is not None
    assert min(held.guard.generations) > 0
    one.release(KEYS[:4])
    one.poll()
    one.check_invariants()


@pytest.mark.parametrize("is_reserved", [False, True])
def test_block_that_is_not_leased_has_a_guard_that_fails(make: Make, is_reserved: bool) -> None:
    """Otherwise a copy of another block's slot with an equal generation could pass the check."""
    cache = make()
    assert not is_reserved or cache.reserve(KEYS[:1]) is not None
    held = cache.hold(KEYS[:1])
    assert held.slots == [0]
    assert held.guard is not None
    assert held.guard.generations == [-1]
    cache.abort(KEYS[:1])


def test_engines_thread_never_connects(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    connecting: list[str] = []

    class NotedChannel(Channel):
        def __init__(self, *given: Any) -> None:
            connecting.append(current_thread().name)
            super().__init__(*given)

    monkeypatch.setattr("kvtier.node.client.channel.Channel", NotedChannel)
    make()
    assert set(connecting) == {"kvtier-node"}


def test_first_look_up_waits_until_the_partition_is_open(make: Make, node: NodeProcess) -> None:
    _store(make(), KEYS[:2])
    late = NodeCache(NodeClient(node.socket), lambda: SCOPE, BLOCK_BYTES, deadline_s=5.0)
    places, pending = late.lookup(KEYS[:2])
    while pending:
        assert places == [BlockState.UNKNOWN] * 2
        (opening,) = pending
        while not opening.is_over:
            time.sleep(0.01)
        places, pending = late.lookup(KEYS[:2])
    assert places == [MEMORY, MEMORY]
    late.close()


def test_nobody_waits_long_for_the_partition_of_a_stopped_node(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.node.client.cache.OPEN_S", 2.0)
    node.pause()
    cache = NodeCache(NodeClient(node.socket), lambda: SCOPE, BLOCK_BYTES, deadline_s=5.0)
    places, (opening,) = cache.lookup(KEYS[:2])
    assert places == [BlockState.UNKNOWN] * 2
    wait_until(lambda: opening.is_over)
    assert "kvtier-node" in {each.name for each in enumerate_threads()}, "it waited for the opener"
    assert cache.lookup(KEYS[:2]) == ([NOWHERE, NOWHERE], [])
    cache.close()
    node.resume()


def test_slots_of_forgotten_copies_stay_in_use_until_these_have_ended(make: Make) -> None:
    one, other = make(), make()
    assert one.reserve(KEYS[:2]) is not None
    one.end_copies()
    one.lookup(KEYS[4:5])
    partition = other.reserve(KEYS[:2])
    assert partition is not None
    assert partition.keys == [], "a rank may still write to the slots of these"
    one.copies_have_ended()
    one.lookup(KEYS[4:5])
    partition = other.reserve(KEYS[:2])
    assert partition is not None
    assert partition.keys == KEYS[:2]


class Disk:
    """Blocks that only the node's disk has, for a client with a clock of its own.

    now_s: the clock.
    """

    def __init__(self, make: Make, folder: Path) -> None:
        self.now_s = 0.0
        self.cache = make(clock=lambda: self.now_s)
        self.keys = [bytes([0, number]) * 18 for number in range(64)]
        for at in range(0, 64, 4):
            _store(self.cache, self.keys[at : at + 4])
            wait_until(partial(self._has_records, folder, 2 + at + 4))
            self.cache.poll()
        self._on_disk = iter(self.keys[:48])
        self.cache.costs.observe_prefill(0, 1600, 100.0)

    @staticmethod
    def _has_records(folder: Path, num_records: int) -> bool:
        return _journal_bytes(folder) >= 64 * num_records

    def decide(self) -> bool:
        """Decide on the next prompt of two blocks. Return whether they are to be loaded."""
        self.now_s += 0.1
        keys = [next(self._on_disk) for _ in range(2)]
        assert self.cache.lookup(keys).states == [STORAGE] * 2
        costs = self.cache.cost_snapshot()
        loads = is_worth_loading(costs, {DISK: 2 * BLOCK_BYTES}, 0, 32)
        if not loads:
            self.cache.probe(keys)
            wait_until(self.has_read)
        self.cache.poll()
        return loads

    def has_read(self) -> bool:
        return all(read.signal.is_over for read in self.cache._reads)


def test_disk_of_a_node_that_was_slow_is_read_again_within_twenty_prompts(
    make: Make, tmp_path: Path
) -> None:
    disk = Disk(make, tmp_path / "disk")
    for _ in range(30):
        disk.cache._model.observe_copy((DISK, HOST), 4 * BLOCK_BYTES, 1000.0)
    decisions = [disk.decide() for _ in range(24)]
    assert not decisions[0]
    assert all(decisions[20:])


def test_a_read_lasts_as_long_as_the_node_says(make: Make, tmp_path: Path) -> None:
    """The engine notices its end in the next step, which may be much later."""
    disk = Disk(make, tmp_path / "disk")
    keys = disk.keys[:4]
    assert disk.cache.lookup(keys).states == [STORAGE] * 4
    assert disk.cache.promote(keys) == 4
    disk.cache.wait_for_reads(keys)
    wait_until(disk.has_read)
    disk.now_s += 1000.0
    disk.cache.poll()
    assert 0 < disk.cache._model.expected_copy_s((DISK, HOST), 4 * BLOCK_BYTES) < 100
