"""A device pool over host memory and storage: loaded pages equal the stored ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.cache.block_cache import BlockState
from kvtier.cache.transfer import TransferEngine
from kvtier.connectors.common.pool_copies import Load, Store
from kvtier.devices import Direction
from kvtier.devices.cpu import CpuDevice
from kvtier.testing import FaultyDevice, StoredBlocks
from tests.connectors.pool_harness import ENDS, NUM_PAGES, PoolHarness, key_of


@pytest.fixture
def harness() -> Iterator[PoolHarness]:
    made = PoolHarness()
    yield made
    made.close()


def test_prompt_comes_back_to_other_pages_layer_by_layer(harness: PoolHarness) -> None:
    assert harness.keep(1, 2, 3)
    harness.scribble(range(NUM_PAGES))
    keys, pages = [key_of(2), key_of(3), key_of(1)], [40, 7, 41]
    load = harness.copies.load(keys, pages)
    for layer, num_buffers in enumerate(ENDS):
        load.job.hold_compute(layer // load.job.layers_per_step)
        assert harness.has(key_of(2), 40, num_buffers)
    assert harness.finish(load, pages)
    assert not harness.has(key_of(1), 0)


def test_what_left_host_memory_comes_back_from_storage(harness: PoolHarness) -> None:
    assert harness.keep(1, 2, 3)
    harness.settle()
    for first in (10, 20):
        assert harness.keep(*range(first, first + 4))
        harness.settle()
    assert harness.places(1, 2, 3) == [BlockState.STORAGE] * 3
    keys = [key_of(1), key_of(2), key_of(3)]
    assert harness.pool.promote(keys) == 3
    harness.settle()
    assert harness.places(1, 2, 3) == [BlockState.MEMORY] * 3
    assert harness.finish(harness.copies.load(keys, [9, 8, 7]), [9, 8, 7])


def test_prompt_larger_than_host_memory_keeps_its_beginning(harness: PoolHarness) -> None:
    assert not harness.keep(*range(12))
    assert harness.places(*range(8)) == [BlockState.MEMORY] * 8
    assert harness.places(8, 9) == [BlockState.NOWHERE] * 2


def test_copy_to_host_memory_that_fails_leaves_nothing() -> None:
    device = FaultyDevice(CpuDevice())
    harness = PoolHarness(engine=TransferEngine(device))
    device.fail(Direction.STORE, 1)
    assert not harness.keep(1, 2)
    assert harness.places(1, 2) == [BlockState.NOWHERE] * 2
    assert harness.keep(1, 2)
    harness.close()


def test_load_that_fails_is_told_of_and_leaves_host_memory_as_it_is() -> None:
    device = FaultyDevice(CpuDevice())
    harness = PoolHarness(engine=TransferEngine(device))
    assert harness.keep(1, 2)
    device.fail(Direction.LOAD, 1)
    load = harness.copies.load([key_of(1)], [30])
    assert not harness.finish(load, [30])
    assert harness.finish(harness.copies.load([key_of(1)], [30]), [30])
    harness.close()


def test_another_process_finds_what_storage_has() -> None:
    stored_blocks = StoredBlocks()
    first = PoolHarness(stored_blocks=stored_blocks)
    assert first.keep(1, 2)
    first.close()
    second = PoolHarness(stored_blocks=stored_blocks)
    assert second.places(1, 2, 3) == [
        BlockState.STORAGE,
        BlockState.STORAGE,
        BlockState.NOWHERE,
    ]
    second.close()
    stranger = PoolHarness(stored_blocks=stored_blocks)
    stranger.digest = b"x" * 32
    assert stranger.places(1, 2) == [BlockState.NOWHERE] * 2
    stranger.close()


class PoolMachine(RuleBasedStateMachine):
    """Store and load prompts that share blocks, in any order, with failures of storage."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = PoolHarness()
        self.stores: list[tuple[Store, list[int]]] = []
        self.loads: list[tuple[Load, list[int]]] = []

    def _free_pages(self) -> list[int]:
        used = {page for _, pages in (*self.stores, *self.loads) for page in pages}
        return [page for page in range(NUM_PAGES) if page not in used]

    @rule(first=st.integers(0, 20), num=st.integers(1, 5))
    def store(self, first: int, num: int) -> None:
        pages = self._free_pages()[:num]
        if len(pages) == num:
            keys = [key_of(number) for number in range(first, first + num)]
            self.stores.append((self.harness.store(keys, pages), pages))

    @rule(first=st.integers(0, 20), num=st.integers(1, 5))
    def load(self, first: int, num: int) -> None:
        keys = [key_of(number) for number in range(first, first + num)]
        places = self.harness.pool.locate_all(keys)
        num_there = next((at for at, p in enumerate(places) if p is not BlockState.MEMORY), num)
        pages = self._free_pages()[:num_there]
        if num_there and len(pages) == num_there:
            self.loads.append((self.harness.copies.load(keys[:num_there], pages), pages))

    @rule(first=st.integers(0, 20), num=st.integers(1, 5))
    def promote(self, first: int, num: int) -> None:
        keys = [key_of(number) for number in range(first, first + num)]
        places = self.harness.pool.locate_all(keys)
        pairs = zip(keys, places, strict=True)
        self.harness.pool.promote([key for key, place in pairs if place is BlockState.STORAGE])

    @rule(call=st.sampled_from(["get", "put"]))
    def break_storage(self, call: str) -> None:
        self.harness.storage.fail(call)

    @rule(data=st.data())
    def end_store(self, data: st.DataObject) -> None:
        if self.stores:
            at = data.draw(st.integers(0, len(self.stores) - 1))
            store, _ = self.stores.pop(at)
            if store.job is not None:
                store.job.wait()
            self.harness.copies.end_store(store)

    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        if self.loads:
            load, pages = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
            assert self.harness.finish(load, pages)

    @rule()
    def poll(self) -> None:
        self.harness.pool.poll()

    @rule()
    def settle(self) -> None:
        self.harness.settle()

    @invariant()
    def slots_add_up(self) -> None:
        self.harness.pool.check_invariants()

    def teardown(self) -> None:
        for store, _ in self.stores:
            if store.job is not None:
                store.job.wait()
            self.harness.copies.end_store(store)
        for load, pages in self.loads:
            assert self.harness.finish(load, pages)
        self.harness.close()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(stateful_step_count=30, deadline=None)
