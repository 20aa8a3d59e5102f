"""Models with windows: a request keeps the KV in its windows, and reuse needs the last cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from kvtier.cache.lease import Lease
from kvtier.cache.states import WindowCache, WindowLease, WindowShape
from kvtier.core.config import CacheConfig
from kvtier.core.errors import ConfigError
from kvtier.core.hints import Hint, Retain
from kvtier.core.keys import next_keys
from kvtier.core.types import DEVICE, DISK, HOST, Label, Slot, WritePolicy
from kvtier.devices.cpu import CpuDevice
from kvtier.index import State
from kvtier.layout import DType, full_attention, named_layout
from kvtier.testing import StoredBlocks, host_memory
from kvtier.tiers import DeviceTier
from tests.cache.tokens.harness import (
    BLOCK_SIZE,
    NS,
    A,
    Content,
    Harness,
    Request,
    store_slowly,
    until,
)
from tests.cache.tokens.states import LONG, check_broken_load, check_deletion, hits, made_of
from tests.cache.tokens.test_cache_machine import StorageMachine

BUNDLES = 2
SHAPE = WindowShape(window=4, num_bundles=BUNDLES, block_size=BLOCK_SIZE, grain_blocks=1)
"""A cut needs the last two blocks' window KV: two cells of two blocks each."""
WHOLE_CHUNKS = WindowShape(window=4, num_bundles=BUNDLES, block_size=BLOCK_SIZE, grain_blocks=4)
"""A cut needs one cell, of the last two blocks of a chunk of four."""


class WindowHarness(Harness):
    """A harness whose engine has layers with windows.

    When it first checks a ring, it marks each slot. No other writer may write there.
    """

    cache: WindowCache
    shape = SHAPE

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.marked = WeakSet[Lease]()

    @classmethod
    def make_cache(cls, *given: Any, **named: Any) -> WindowCache:
        return WindowCache(*given, **named, shape=cls.shape)

    def marks(self, lease: Lease) -> Iterator[tuple[Slot, Content]]:
        for at, slot in enumerate(lease.ring):
            yield slot, self.block_bytes.expected(b"ring", [b"%d %d" % (id(lease), at)])

    def compute(self, request: Request, num_blocks: int) -> None:
        first = request.num_written
        super().compute(request, num_blocks)
        grain = self.shape.grain_blocks
        for at in range(first // grain * grain + grain, num_blocks + 1, grain):
            slots = request.lease.snapshot_slots(at)
            for slot, block in zip(slots, self.cell(request, at), strict=bool(slots)):
                self.block_bytes.write(self.pool.memory, self.pool.layout, slot, block)

    def cell(self, request: Request, at: int) -> list[Content]:
        """Return the content of the cell at the end of the first ``at`` blocks."""
        labels = self.cell_name(request.namespace, request.labels[:at])
        return [
            self.block_bytes.expected(request.namespace, labels[: n + 1])
            for n in range(len(labels))
        ]

    def cell_name(self, namespace: bytes, labels: Sequence[Label]) -> list[Label]:
        """Return the labels of the cell at the end of a prefix."""
        return self.cache._cell(next_keys(namespace, labels)[-1])

    def check_request(self, request: Request, content: Content | None = None) -> None:
        super().check_request(request, content)
        lease = request.lease
        assert isinstance(lease, WindowLease)
        if lease not in self.marked:
            self.marked.add(lease)
            for slot, mark in self.marks(lease):
                self.block_bytes.write(self.pool.memory, self.pool.layout, slot, mark)
        held = self.contents()[DEVICE]
        for slot, mark in self.marks(lease):
            assert np.array_equal(held[slot], mark), "somebody wrote into a ring"
        if lease.broken or not lease.ready or lease.start is None:
            return
        assert lease.decision is not None
        cut = lease.decision.plan.num_reused_blocks
        expected = [
            block for at in self.shape.ends_in_reach(cut)[::-1] for block in self.cell(request, at)
        ]
        for slot, right in zip(lease.start_slots, expected, strict=True):
            assert np.array_equal(held[slot], right), "wrong bytes in a cell"

    def num_cells(self, tier: str, request: Request) -> list[int]:
        """Return the prefix lengths, in blocks, at which ``tier`` has a whole cell."""
        found = []
        grain = self.shape.grain_blocks
        for at in range(grain, len(request.labels) + 1, grain):
            name = self.cell_name(request.namespace, request.labels[:at])
            states = self.cache._index.states(request.namespace, name, tier)
            if states == [State.READY] * self.shape.blocks_per_cell:
                found.append(at)
        return found


def shaped(shape: WindowShape = SHAPE, **given: Any) -> WindowHarness:
    """Return a harness with another shape."""
    kind: type[WindowHarness] = type("Shaped", (WindowHarness,), {"shape": shape})
    return kind(**given)


@pytest.fixture
def make() -> Iterator[Callable[..., WindowHarness]]:
    yield from made_of(shaped, device_blocks=60, host_blocks=90, disk_blocks=90)


Make = Callable[..., WindowHarness]


@pytest.mark.parametrize("shape", [SHAPE, WHOLE_CHUNKS], ids=["two cells", "one cell"])
def test_a_prompt_is_reused_from_every_tier_with_the_cells_in_reach(
    make: Make, shape: WindowShape
) -> None:
    shelf = StoredBlocks()
    harness = make(shape, shelf=shelf)
    grain = shape.grain_blocks
    num_stored = 12 + 12 // grain * shape.blocks_per_cell
    harness.serve(LONG)
    assert hits(harness.serve(LONG)) == {DEVICE: 12}
    harness.lose_the_device()
    assert hits(harness.serve(LONG)) == {HOST: 12}
    until(harness, lambda: len(shelf.blocks) == num_stored)
    harness = make(shape, shelf=shelf.copy())
    request = harness.start(LONG)
    assert hits(request) == {DISK: 12}
    needed = shape.num_cells * shape.blocks_per_cell
    assert request.lease.record.load_bytes == (12 + needed) * harness.cache.group.bytes_per_block
    assert len(request.lease.start_slots) == needed
    harness.finish(request)


def test_a_prompt_of_whole_blocks_can_be_repeated_from_every_tier(make: Make) -> None:
    shelf = StoredBlocks()
    harness = make(shelf=shelf)
    harness.serve(A)
    assert hits(harness.serve(A)) == {DEVICE: 3}
    harness.lose_the_device()
    assert hits(harness.serve(A)) == {HOST: 3}
    until(harness, lambda: len(shelf.blocks) == 4 + 4 * BUNDLES)
    assert hits(make(shelf=shelf.copy()).serve(A)) == {DISK: 3}


def test_a_prompt_is_stored_up_to_the_last_cut_whose_cells_are_stored(make: Make) -> None:
    harness = make()
    assert harness.storage is not None
    request = store_slowly(harness, LONG)
    cell = harness.cell_name(NS, request.labels)
    harness.storage.spoiled.add(next_keys(NS, cell)[-1])
    harness.lose_the_device()
    harness.cache.clear(HOST)
    assert harness.fetch(LONG) is not None
    assert harness.cache.drain()
    assert harness.cache.stored(NS, request.labels) == (11, False)


def test_hints_and_waiting_requests_protect_the_cells_in_reach(make: Make) -> None:
    harness = make()
    labels = harness.serve(LONG).labels
    told: list[list[Label]] = []
    retain = harness.cache._index.retain

    def noted(namespace: bytes, labels: Sequence[Label], *given: Any) -> None:
        told.append(list(labels))
        retain(namespace, labels, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.cache._index, "retain", noted)
        cells = [harness.cell_name(NS, labels[:at]) for at in (12, 11)]
        harness.cache.wait(NS, labels, True)
        assert told == [list(labels), *cells]
        told.clear()
        harness.cache.hint(NS, labels, Hint((Retain(90, first_token=4),), back_in_s=9.0))
        assert told == [list(labels)] * 2 + [cells[0]] * 2 + [cells[1]] * 2
        told.clear()
        harness.cache.hint(NS, labels, Hint((Retain(90, last_token=4),)))
        assert told == [list(labels)]


def test_a_running_request_holds_a_ring_and_no_more(make: Make) -> None:
    harness = make(host_blocks=60)
    for num_tokens in (3, 7, 25):
        request = harness.start([5] * num_tokens, namespace=b"%d" % num_tokens)
        num_blocks = num_tokens // BLOCK_SIZE + 1
        assert len(request.lease.slots) == num_blocks
        assert len(request.lease.ring) == BUNDLES * min(num_blocks, 3)
        for at in range(1, len(request.labels) + 1):
            harness.compute(request, at)
            harness.cache.commit(request.lease, at)
            harness.check()
            assert len(request.lease.reserved_slots) == num_blocks - at + len(request.lease.ring)
        assert harness.cache.drain()
        leased = [node for node in harness.nodes() if node.residencies[0].leases]
        assert len(leased) == len(request.labels), "a running request holds a cell"
        harness.release(request)


def test_what_a_window_has_passed_is_freed_on_the_device_and_stays_below(make: Make) -> None:
    harness = make()
    request = harness.start(LONG)
    for at in range(1, 13):
        harness.compute(request, at)
        harness.cache.commit(request.lease, at)
        assert harness.cache.drain()
    # Two cells for the next turn, and one for a repetition of the prompt.
    assert harness.num_cells(DEVICE, request) == [10, 11, 12]
    assert harness.num_cells(HOST, request) == list(range(1, 13))
    harness.release(request)
    branch = harness.start([*LONG[:13], 7, 7, 7])
    assert branch.lease.num_shared == 6, "a cut inside has its cells from host memory"
    assert hits(branch) == {DEVICE: 6}
    assert branch.lease.record.load_bytes == 2 * BUNDLES * harness.cache.group.bytes_per_block
    harness.finish(branch)


def test_without_a_tier_below_nothing_is_freed_before_the_room_is_needed(make: Make) -> None:
    harness = make(host_blocks=0, disk_blocks=0, device_blocks=60)
    request = harness.serve(LONG)
    assert harness.num_cells(DEVICE, request) == list(range(1, 13))
    assert harness.start([*LONG[:13], 7, 7, 7]).lease.num_shared == 6


def test_a_cut_needs_every_cell_in_reach(make: Make) -> None:
    harness = make(host_blocks=0, disk_blocks=0)
    request = harness.serve(LONG)
    name = harness.cell_name(NS, request.labels[:11])
    harness.cache._ladder.evict_blocks(harness.cache._index.extend(NS, name), DEVICE)
    assert harness.ask(LONG).lease.num_shared == 10


@pytest.mark.parametrize("policy", ["lru", "runs"])
def test_cells_that_no_cut_needs_leave_host_memory_first(make: Make, policy: str) -> None:
    """The prompt is used repeatedly, but only the last of its cells."""
    harness = make(host_blocks=12 + 12 * BUNDLES, disk_blocks=0, eviction_policy=policy)
    request = harness.serve(LONG)
    assert harness.num_cells(HOST, request) == list(range(1, 13))
    for num_tokens in range(25, 29):
        harness.serve([*LONG, 3, 3, 3][:num_tokens])
        harness.clock.now += 5
    harness.serve([8] * 9)
    assert harness.num_cells(HOST, request) == [10, 11, 12]
    states = harness.cache._index.states(NS, request.labels, HOST)
    assert states.count(State.READY) == 12
    harness.lose_the_device()
    assert hits(harness.start(LONG)) == {HOST: 12}


def test_a_request_without_room_for_its_ring_waits(make: Make) -> None:
    harness = make(device_blocks=4 + 3 * BUNDLES, host_blocks=0, disk_blocks=0)
    first = harness.ask([1] * 7)
    assert harness.fetch([2] * 7) is None
    harness.release(first)
    assert harness.fetch([2] * 7) is not None


def test_where_there_is_no_room_for_a_cell_the_prompt_goes_on(make: Make) -> None:
    harness = make(device_blocks=4 + 3 * BUNDLES, host_blocks=0, disk_blocks=0)
    request = harness.start([1] * 7)
    assert request.lease.snapshot_slots(1) == ()
    harness.finish(request)
    assert harness.start([1] * 7).lease.num_shared == 0


def test_a_deleted_prompt_leaves_no_cell(make: Make) -> None:
    check_deletion(make, 12 + 12 * BUNDLES)


def test_cells_belong_to_the_namespace_of_their_prompt(make: Make) -> None:
    harness = make(disk_blocks=0)
    harness.serve(A, namespace=b"mine")
    harness.serve(A, namespace=b"theirs")
    used = harness.cache.used_by_namespace()
    size = harness.cache.group.bytes_per_block
    assert set(used) == {b"mine", b"theirs"}
    assert used[b"mine"][HOST] == (4 + 4 * BUNDLES) * size
    deletion = harness.cache.delete_all(lambda namespace: namespace == b"mine")
    until(harness, lambda: harness.cache.is_deleted(deletion))
    assert harness.held(HOST) == 4 + 4 * BUNDLES


def test_a_prompt_deleted_while_it_runs_stores_no_cell(make: Make) -> None:
    harness = make()
    request = harness.start(LONG)
    harness.compute(request, 4)
    harness.cache.commit(request.lease, 4)
    harness.cache.delete(NS, request.labels)
    harness.finish(request)
    assert [harness.held(tier) for tier in (DEVICE, HOST, DISK)] == [0, 0, 0]


def test_a_load_of_a_cell_that_fails_breaks_the_lease(make: Make) -> None:
    shelf = StoredBlocks()
    before = make(shelf=shelf)
    labels = before.serve(LONG).labels
    until(before, lambda: len(shelf.blocks) == 12 + 12 * BUNDLES)
    key = next_keys(NS, before.cell_name(NS, labels[:11]))[-1]
    assert check_broken_load(make, shelf, key) == 10


def test_a_pool_of_other_blocks_is_refused() -> None:
    layout = named_layout("layer_first", full_attention(1, 1, 2, DType.FLOAT16, 4), 8)
    with pytest.raises(ConfigError, match="block_size=2, but the pool's is 4"):
        WindowCache(
            CacheConfig(), CpuDevice(), DeviceTier(host_memory(layout.nbytes), layout), shape=SHAPE
        )


@given(
    window=st.integers(1, 40),
    bundles=st.integers(1, 3),
    block_size=st.integers(1, 5),
    grain=st.integers(1, 4),
    chunk=st.integers(0, 20),
)
def test_a_ring_holds_what_a_chunk_reaches_and_cells_hold_what_a_cut_needs(
    window: int, bundles: int, block_size: int, grain: int, chunk: int
) -> None:
    shape = WindowShape(window, bundles, block_size, grain)
    start, end = chunk * grain * block_size, (chunk + 1) * grain * block_size
    first = max(0, start + 1 - window)
    num_touched = (end - 1) // block_size - first // block_size + 1
    ring = shape.ring_blocks(1 << 20)
    assert num_touched * bundles <= ring
    assert ring <= bundles * (-(-window // block_size) + grain)  # the window and a chunk
    cut = start // block_size
    held = {
        block for at in shape.ends_in_reach(cut) for block in range(at - shape.blocks_of_prompt, at)
    }
    assert held.issuperset(range(first // block_size, cut))
    assert len(held) * bundles <= ring
    assert len(shape.ends_in_reach(cut)) <= shape.num_cells
    for decoded in range(end, end + block_size):
        reach = max(0, decoded + 1 - window)
        assert (decoded // block_size - reach // block_size + 1) * bundles <= ring


class WindowMachine(StorageMachine):
    """Random requests, faults, evictions and restarts over prompts with cells."""

    make_harness = WindowHarness
    disk_blocks = 20
    has_lost = True  # a prompt may have too few slots for a cell

    def _num_could_be_had(self) -> int:
        return 0  # rings and cells take slots, too


class WriteBackMachine(WindowMachine):
    policy = WritePolicy.WRITE_BACK


class ChunksHarness(WindowHarness):
    shape = WindowShape(window=6, num_bundles=1, block_size=BLOCK_SIZE, grain_blocks=2)


class ChunksMachine(WindowMachine):
    make_harness = ChunksHarness


@pytest.mark.parametrize("machine", [WindowMachine, WriteBackMachine, ChunksMachine])
def test_random_requests(machine: type[WindowMachine]) -> None:
    few = settings(stateful_step_count=40, max_examples=settings.default.max_examples // 2)
    run_state_machine_as_test(machine, settings=few)
