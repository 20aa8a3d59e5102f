"""Cost of a long prompt on the deciding thread: counted, not timed."""

from __future__ import annotations

import gc
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cache.ladder.in_flight import LEAST_BLOCKS, POLL_BLOCKS, InFlight
from kvtier.cache.ladder.loads import GROWTH, SHARE, piece_sizes
from kvtier.cache.ladder.lookup_batch import FIRST_KEYS
from kvtier.cache.ladder.lookup_batch import GROWTH as MORE_KEYS
from kvtier.cache.transfer import Job, Transfer
from kvtier.core import keys
from kvtier.core.grouping import runs_of
from kvtier.core.hot import NATIVE
from kvtier.core.keys import token_labels
from kvtier.core.types import DEVICE, DISK, HOST, BlockId, Slot
from kvtier.devices import Direction
from kvtier.index import native_index, python_index
from kvtier.testing import StoredBlocks
from kvtier.tiers import DistantAllocator, StorageFacts
from kvtier.tiers.memory.slots import SlotPool
from tests.cache.tokens.harness import BLOCK_SIZE, NS, Harness, until

FACTS = StorageFacts(finds_at_once=True)

# -- pieces ----------------------------------------------------------------------------------------


@given(st.integers(0, 100_000), st.integers(1, 500))
def test_pieces_grow_with_what_was_begun_and_are_never_many(num_blocks: int, first: int) -> None:
    sizes = list(piece_sizes(num_blocks, first))
    assert sum(sizes) == num_blocks
    num_begun = 0
    for size in sizes:
        assert 0 < size <= max(first, num_begun // GROWTH), "copying on begins too late"
        assert size <= max(first, num_blocks // SHARE), "too much is copied on at the end"
        num_begun += size
    assert len(sizes) <= 3 * SHARE
    assert all(size <= later for size, later in pairwise(sizes[:-1]))


def test_a_short_load_comes_in_pieces_of_one_size() -> None:
    assert list(piece_sizes(10, 4)) == [4, 4, 2]
    assert list(piece_sizes(4, 4)) == [4]
    assert list(piece_sizes(0, 4)) == []


# -- calls -----------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count calls of the index, except those of its own checks."""
    counted: Counter[str] = Counter()
    harness = Harness()
    kind = type(harness.cache._index)
    harness.close()

    def count(name: str) -> None:
        inner = getattr(kind, name)

        def call(*arguments: Any, **named: Any) -> Any:
            counted[name] += 1
            return inner(*arguments, **named)

        monkeypatch.setattr(kind, name, call)

    for name in vars(kind):
        if name[0] != "_" and callable(getattr(kind, name)) and name != "check_invariants":
            count(name)
    return counted


def a_prompt(num_blocks: int) -> list[int]:
    """Return a prompt of ``num_blocks`` blocks, and a token that is left to compute."""
    return [7 + at // 1000 for at in range(num_blocks * BLOCK_SIZE)] + [1]


def a_harness(num_blocks: int, shelf: StoredBlocks | None = None) -> Harness:
    room = num_blocks + 8
    return Harness(
        device_blocks=room,
        host_blocks=room,
        disk_blocks=room,
        shelf=shelf,
        storage_facts=FACTS,
    )


@pytest.mark.parametrize("num_blocks", [40, 640])
def test_calls_of_the_index_are_a_few_for_each_piece(num_blocks: int, calls: Counter[str]) -> None:
    """The calls of fetching a prompt from storage, of noticing its arrival and of its release."""
    tokens, shelf = a_prompt(num_blocks), StoredBlocks()
    before = a_harness(num_blocks, shelf)
    before.serve(tokens)
    before.close()
    harness = a_harness(num_blocks, shelf)
    num_pieces = len(list(piece_sizes(num_blocks, 2)))
    calls.clear()
    request = harness.start(tokens)
    assert request.lease.num_shared == num_blocks
    assert [len(keys) for keys in harness.storage.reads] == list(piece_sizes(num_blocks, 2))
    harness.check_request(request)
    harness.release(request)
    del calls["num_held"]  # calls of the invariant checks
    assert sum(calls.values()) <= 30 + 20 * num_pieces, calls.most_common()
    harness.close()


@pytest.mark.skipif(not NATIVE, reason="lists of Python are the collector's business")
def test_the_collector_passes_over_what_the_index_and_the_slots_give() -> None:
    harness = a_harness(8)
    request = harness.serve(a_prompt(8))
    match = harness.cache.match(NS, token_labels(a_prompt(8), BLOCK_SIZE))
    index: Any = harness.cache._index
    given: list[object] = [match.blocks, match.tiers, index.slots(match.blocks, DEVICE)]
    given += [index.states_of(match.blocks, HOST), index.names(match.blocks).keys]
    given.append(SlotPool(4).allocate(3))
    assert match.blocks
    assert not request.lease.blocks, "it was released"
    assert not any(map(gc.is_tracked, given))
    harness.close()


def test_few_keys_are_hashed_of_a_prompt_that_storage_does_not_have() -> None:
    num_blocks = 4 * FIRST_KEYS
    shelf = StoredBlocks()
    before = a_harness(num_blocks, shelf)
    before.serve(a_prompt(num_blocks))
    before.close()
    harness = a_harness(num_blocks, shelf)
    asked: Any = []
    storage: Any = harness.storage
    find = storage.find
    storage.find = lambda keys, timeout_s: asked.append(len(keys)) or find(keys, timeout_s)
    harness.fetch([9] * (num_blocks * BLOCK_SIZE))
    assert asked == [FIRST_KEYS]
    harness.fetch(a_prompt(num_blocks))
    assert asked[1:] == [FIRST_KEYS, min(MORE_KEYS * FIRST_KEYS, num_blocks - FIRST_KEYS)]
    harness.close()


def test_keys_that_were_computed_ahead_are_not_hashed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither look-ups in storage nor writes hash them again."""
    num_blocks, shelf = 4 * FIRST_KEYS, StoredBlocks()
    harness = a_harness(num_blocks, shelf)
    assert not harness.cache.wants_keys(token_labels([1] * 99_999, BLOCK_SIZE)), (
        "nothing is unindexed"
    )
    labels = token_labels(a_prompt(num_blocks), BLOCK_SIZE)
    labels.compute_keys(NS)
    for module in (keys, native_index, python_index):
        for name in vars(module).keys() & {"next_key", "next_keys"}:
            monkeypatch.setattr(module, name, None)
    for _ in range(2):
        lease = harness.cache.fetch(NS, labels, num_blocks * BLOCK_SIZE + 1, num_blocks + 1)
        assert lease is not None
        until(harness, lambda lease=lease: lease.ready)  # type: ignore[misc]
        harness.cache.commit(lease, num_blocks)
        harness.cache.release(lease)
        assert harness.cache.drain()
        assert len(shelf.blocks) == num_blocks
        harness.cache.close()
        harness = a_harness(num_blocks, shelf)
    assert harness.cache.wants_keys(token_labels([1] * 99_999, BLOCK_SIZE))
    assert not harness.cache.wants_keys(token_labels([1] * 99, BLOCK_SIZE)), "soon done"
    harness.cache.close()


# -- polls -----------------------------------------------------------------------------------------


class SeenJob(Job):
    """A job that counts how often ``done`` is read."""

    num_looks = 0

    @property
    def done(self) -> bool:
        SeenJob.num_looks += 1
        return super().done


@pytest.fixture
def under_way() -> InFlight:
    SeenJob.num_looks = 0
    return InFlight({HOST: DistantAllocator(200_000)})


def begun(under_way: InFlight, num: int, num_blocks: int = 1) -> list[Transfer]:
    """Begin transfers to the next slots of the host tier."""
    first = sum(len(each.blocks) for each in under_way.all)
    made = []
    for at in range(first, first + num * num_blocks, num_blocks):
        slots = [Slot(at + more) for more in range(num_blocks)]
        transfer = Transfer(DISK, HOST, tuple(map(BlockId, slots)), dst_slots=slots)
        under_way.add(transfer)
        under_way.watch(transfer, SeenJob(0))
        made.append(transfer)
    return made


def test_a_poll_looks_at_what_has_ended_only(under_way: InFlight) -> None:
    transfers = begun(under_way, 1000)
    SeenJob.num_looks = 0
    assert list(under_way.take_ended()) == []
    assert SeenJob.num_looks == 0
    job = transfers[700].job
    assert job is not None
    job.finish()
    looks = SeenJob.num_looks
    assert list(under_way.take_ended()) == [transfers[700]]
    assert SeenJob.num_looks == looks
    under_way.remove(transfers[700])
    assert list(under_way.take_ended()) == []


@pytest.mark.parametrize("num_blocks", [1, 300, POLL_BLOCKS, 2 * POLL_BLOCKS])
def test_a_poll_takes_its_turn_of_what_has_ended(under_way: InFlight, num_blocks: int) -> None:
    transfers = begun(under_way, 40, num_blocks)
    for transfer in transfers:
        assert transfer.job is not None
        transfer.job.finish()
    taken: list[Transfer] = []
    while some := list(under_way.take_ended()):
        assert (len(some) - 1) * max(num_blocks, LEAST_BLOCKS) < POLL_BLOCKS
        for transfer in some:
            under_way.remove(transfer)
        taken += some
    assert taken == transfers


def test_what_was_finished_otherwise_is_not_given_again(under_way: InFlight) -> None:
    first, second = begun(under_way, 2)
    for transfer in (second, first):
        assert transfer.job is not None
        transfer.job.finish()
    under_way.remove(second)
    assert list(under_way.take_ended()) == [first]


@given(st.data())
def test_who_fills_a_slot_is_found_by_the_slot(data: st.DataObject) -> None:
    under_way = InFlight({HOST: DistantAllocator(12)})
    filled_by: dict[int, Transfer] = {}
    for _ in range(data.draw(st.integers(0, 8))):
        free = sorted(set(range(12)) - set(filled_by))
        some = data.draw(st.lists(st.sampled_from(free), unique=True)) if free else []
        slots = [Slot(slot) for slot in some]
        transfer = Transfer(DISK, HOST, tuple(map(BlockId, slots)), dst_slots=slots)
        under_way.add(transfer)
        filled_by.update(dict.fromkeys(slots, transfer))
        if data.draw(st.booleans(), label="one ends"):
            ended = data.draw(st.sampled_from(list(under_way.all)))
            under_way.remove(ended)
            filled_by = {slot: by for slot, by in filled_by.items() if by is not ended}
    asked = data.draw(st.lists(st.integers(0, 11).map(Slot), max_size=20))
    found: dict[int, Transfer] = {}
    for transfer, positions in under_way.filling(asked, HOST):
        assert not found.keys() & set(positions)
        found.update(dict.fromkeys(positions, transfer))
    assert found == {at: filled_by[slot] for at, slot in enumerate(asked) if slot in filled_by}
    assert under_way.newest(2) == list(under_way.all)[-2:]


def test_the_next_deadline_is_all_that_a_poll_looks_at() -> None:
    """Two prompts are loading. Each load is given up at its own deadline."""
    harness = Harness(device_blocks=20, load_deadline_s=10.0)
    for tokens in ([1] * 8, [2] * 8):
        harness.serve(tokens)
    harness.lose_the_device()
    harness.device.hold(Direction.LOAD)
    first = harness.ask([*[1] * 8, 5])
    harness.clock.now += 5
    second = harness.ask([*[2] * 8, 5])
    harness.clock.now += 6
    harness.cache.poll()
    assert (first.lease.late, second.lease.late) == (True, False)
    assert list(harness.cache._loading) == [second.lease]
    harness.release(second)
    assert not harness.cache._loading
    harness.clock.now += 60
    harness.cache.poll()
    assert not second.lease.late
    harness.close()


def test_a_lease_that_is_ready_is_not_looked_at_again() -> None:
    harness = Harness()
    harness.serve([1] * 8)
    request = harness.start([*[1] * 8, 5])
    until(harness, lambda: not harness.cache._loading)
    assert request.lease.ready
    harness.close()


# -- followers -------------------------------------------------------------------------------------


@given(st.integers(1, 16), st.sets(st.integers(0, 15), max_size=2))
def test_a_follower_begins_after_its_leader_or_ends_with_it(
    num_blocks: int, unread: set[int]
) -> None:
    """A prompt in storage passes through host memory; some blocks cannot be read."""
    spoiled = sorted(at for at in unread if at < num_blocks)
    harness = a_harness(num_blocks)
    tokens = a_prompt(num_blocks)
    harness.serve(tokens)
    harness.lose_the_device()
    harness.cache.clear(HOST)
    blocks = harness.cache.match(NS, token_labels(tokens, BLOCK_SIZE)).blocks
    harness.storage.spoiled.update(harness.cache._index.key(blocks[at]) for at in spoiled)
    request = harness.ask(tokens)
    transfers = harness.cache._ladder._transfers.in_flight.all
    for leader in [transfer for transfer in transfers if transfer.src == DISK]:
        assert [follower.src for follower in leader.followers] == [HOST]
        assert leader.followers[0].blocks == leader.blocks
        assert leader.followers[0].job is None, "its sources are not there yet"
    harness.wait()
    assert harness.cache.drain()
    assert not transfers
    assert request.lease.ready
    assert request.lease.broken == bool(spoiled)
    harness.check()
    if not spoiled:
        assert request.lease.held == [DEVICE] * num_blocks
    harness.close()


# -- runs ------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["a", "b", None]), max_size=12), st.integers(0, 5))
def test_runs_are_neighbours_that_are_alike(values: list[str | None], first: int) -> None:
    runs = list(runs_of(values, first))
    assert [value for value, run in runs for _ in run] == values
    assert [at for _, run in runs for at in run] == list(range(first, first + len(values)))
    assert all(one != another for (one, _), (another, _) in pairwise(runs))
