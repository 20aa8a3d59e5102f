"""The engine computes chunks at the front of a prefix while it is loaded from its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.core.keys import token_labels
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.testing import StoredBlocks

from .harness import BLOCK_SIZE, NS, Harness, Request, count, until

MakeHarness = Callable[..., Harness]
PROMPT = [*range(1, 17), 9]
"""Eight blocks, and a token left to compute."""
OTHER = [*range(101, 117), 9]
CHUNK = 2
FAST_S, SLOW_S = 1e-9, 1e3
"""Seconds to compute a token."""


@pytest.fixture
def shelf(make_harness: MakeHarness) -> StoredBlocks:
    """Return storage that has two prompts from an earlier harness."""
    shelf = StoredBlocks()
    earlier = make_harness(disk_blocks=30, shelf=shelf)
    for prompt in (PROMPT, OTHER):
        earlier.serve(prompt)
    return shelf.copy()


@pytest.fixture
def harness(make_harness: MakeHarness, shelf: StoredBlocks) -> Harness:
    """Return a harness whose next read waits, after a first one that was measured."""
    return ready(make_harness(disk_blocks=30, device_blocks=24, shelf=shelf))


def ready(harness: Harness) -> Harness:
    harness.cache.observe_prefill(0, 100, 100 * SLOW_S)
    harness.serve(OTHER)
    harness.lose_the_device()
    computes_in(harness, FAST_S)
    harness.wait_for_threads()
    harness.storage.open_reads.clear()
    harness.storage.reads.clear()
    return harness


def computes_in(harness: Harness, token_s: float) -> None:
    """Make the cache believe that a token takes so long to compute."""
    costs = harness.cache._ladder.costs
    costs.expected_prefill_s = lambda first, end: (end - first) * token_s


def fetch(harness: Harness, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> Request:
    """Fetch a prompt whose load is planned from the end."""
    monkeypatch.setattr("kvtier.plan.planner.WORTH_IT", float("inf"))
    monkeypatch.setattr("kvtier.plan.planner.WORTH_S", -float("inf"))
    labels = token_labels(tokens, BLOCK_SIZE)
    lease = harness.cache.fetch(NS, labels, len(tokens), 9, CHUNK, from_both_ends=True)
    assert lease is not None
    request = Request(NS, labels, len(tokens), lease)
    harness.requests.append(request)
    assert lease.decision is not None
    assert lease.decision.plan.from_both_ends
    until(harness, lambda: len(harness.storage.reads) > 0)
    return request


def compute(harness: Harness, request: Request) -> range:
    """Compute the next chunk if there is one to compute. Return its blocks."""
    with harness.cache.claim(request.lease, CHUNK) as blocks:
        for position in blocks:
            content = harness.expected(request, position)
            slot = request.lease.slots[position]
            harness.block_bytes.write(harness.pool.memory, harness.pool.layout, slot, content)
    return blocks


def arrive(harness: Harness) -> None:
    harness.storage.open_reads.set()
    assert harness.cache.drain()
    harness.check()


def test_the_front_is_computed_and_the_end_is_loaded(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = fetch(harness, PROMPT, monkeypatch)
    assert [compute(harness, request) for _ in range(3)] == [range(2), range(2, 4), range(4, 6)]
    assert not compute(harness, request), "the last chunk is being read"
    assert harness.matched(PROMPT)[:6] == [DEVICE] * 6
    assert not request.lease.ready
    arrive(harness)
    assert request.lease.ready
    assert [len(keys) for keys in harness.storage.reads] == [2]
    assert harness.used() == (9, 2 + 8), "the reads that were cancelled keep no host memory"
    record = request.lease.record
    assert record.hit_blocks == {DISK: 2}
    assert record.load_bytes == 2 * harness.cache.group.bytes_per_block
    assert request.lease.claimed == [range(2), range(2, 4), range(4, 6)]
    assert not compute(harness, request)
    harness.finish(request)


def test_chunks_are_read_from_the_last_to_the_first(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = fetch(harness, PROMPT, monkeypatch)
    arrive(harness)
    names = harness.cache._index.names(request.lease.blocks)
    expected = [[name.key for name in names[at : at + 2]] for at in (6, 4, 2, 0)]
    assert harness.storage.reads == expected
    assert request.lease.record.hit_blocks == {DISK: 8}
    harness.finish(request)


def test_a_chunk_is_not_computed_if_the_load_ends_sooner(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = fetch(harness, PROMPT, monkeypatch)
    computes_in(harness, SLOW_S)
    assert not compute(harness, request)
    arrive(harness)
    assert request.lease.record.hit_blocks == {DISK: 8}
    harness.finish(request)


def test_a_usual_load_is_not_computed(harness: Harness) -> None:
    computes_in(harness, SLOW_S)
    request = harness.ask(PROMPT)
    computes_in(harness, FAST_S)
    assert not compute(harness, request)
    arrive(harness)
    harness.finish(request)


def test_a_computation_that_fails_breaks_the_lease_and_leaks_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = fetch(harness, PROMPT, monkeypatch)

    def fail() -> None:
        with harness.cache.claim(request.lease, CHUNK) as blocks:
            assert blocks == range(2)
            raise RuntimeError("the model failed")

    with pytest.raises(RuntimeError):
        fail()
    assert request.lease.broken
    assert harness.matched(PROMPT)[0] == DISK
    assert not compute(harness, request)
    harness.release(request)
    arrive(harness)
    assert count(harness.cache.metrics, "kvtier_failed_copies_total", src=HOST, dst=DEVICE) == 0


def test_what_is_computed_arrives_for_every_request_that_waits_for_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = fetch(harness, PROMPT, monkeypatch)
    computes_in(harness, SLOW_S)
    other = harness.ask([*PROMPT, 5])
    computes_in(harness, FAST_S)
    assert other.lease.num_shared == 8
    while compute(harness, request):
        harness.check()
    assert not other.lease.ready
    arrive(harness)
    assert request.lease.ready
    assert other.lease.ready
    assert other.lease.slots[:8] == request.lease.slots[:8], "no block has two slots"
    assert other.lease.record.hit_blocks == {DISK: 8}, "it has computed none of it"
    harness.finish(other)
    harness.finish(request)


def test_a_load_that_fails_halfway_leaves_what_was_computed(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = fetch(harness, PROMPT, monkeypatch)
    assert compute(harness, request)
    harness.storage.unreachable = True
    arrive(harness)
    assert request.lease.broken
    assert not compute(harness, request)
    harness.release(request)
    again = harness.ask(PROMPT, load=False)
    assert again.lease.ready
    assert again.lease.record.hit_blocks == {DEVICE: 2}
    harness.storage.unreachable = False
    harness.finish(again)


def test_a_request_may_leave_between_two_chunks(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = fetch(harness, PROMPT, monkeypatch)
    assert compute(harness, request)
    harness.release(request)
    arrive(harness)
    assert harness.matched(PROMPT) == [DEVICE] * 8


def test_a_read_that_a_queued_request_waits_for_goes_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = fetch(harness, PROMPT, monkeypatch)
    prefetch = harness.prefetch(PROMPT)
    assert prefetch is not None
    assert not compute(harness, request)
    harness.end_prefetch(prefetch)
    assert compute(harness, request), "its end cancels no read that has followers"
    arrive(harness)
    harness.finish(request)


@pytest.mark.parametrize("has_device", [True, False], ids=["device", "host"])
def test_the_chunk_that_memory_has_in_part_is_loaded_first(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, has_device: bool
) -> None:
    harness.storage.open_reads.set()
    harness.serve([*PROMPT[:6], 200])
    if not has_device:
        harness.lose_the_device()
    harness.wait_for_threads()
    harness.storage.open_reads.clear()
    request = fetch(harness, PROMPT, monkeypatch)
    assert not compute(harness, request)
    arrive(harness)
    assert [len(keys) for keys in harness.storage.reads[-3:]] == [1, 2, 2]
    assert request.lease.record.hit_blocks[DISK] == 5
    harness.finish(request)
