"""Reading storage for requests that are still queued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtier.core.errors import ConfigError
from kvtier.core.types import DEVICE, DISK, HOST, PrefetchPolicy
from kvtier.testing import StoredBlocks

from .harness import A, B, Harness

MakeHarness = Callable[..., Harness]
LONG_A, LONG_B = [*A, 9], [*B, 9]
"""Four blocks each, read in two pieces, and a token left to compute."""


@pytest.fixture
def shelf(make_harness: MakeHarness) -> StoredBlocks:
    """Return storage that has A and B from an earlier harness."""
    shelf = StoredBlocks()
    earlier = make_harness(disk_blocks=30, shelf=shelf)
    for prompt in (LONG_A, LONG_B):
        earlier.serve(prompt)
    return shelf.copy()


@pytest.fixture
def harness(make_harness: MakeHarness, shelf: StoredBlocks) -> Harness:
    return make_harness(disk_blocks=30, shelf=shelf)


def hits(harness: Harness, tokens: list[int]) -> dict[str, int]:
    request = harness.start(tokens)
    found = request.lease.record.hit_blocks
    harness.finish(request)
    return found


def test_what_arrives_before_the_turn_comes_from_host_memory(harness: Harness) -> None:
    prefetch = harness.prefetch(LONG_A)
    assert not prefetch.ready
    assert harness.cache.drain()
    assert prefetch.ready
    assert harness.matched(LONG_A) == [HOST] * 4
    harness.check()
    assert hits(harness, LONG_A) == {HOST: 4}


def test_what_was_prefetched_stays_until_it_is_used(harness: Harness) -> None:
    prefetch = harness.prefetch(LONG_A)
    assert harness.cache.drain()
    harness.cache.clear(HOST)
    assert harness.matched(LONG_A) == [HOST] * 4
    harness.end_prefetch(prefetch)
    harness.cache.clear(HOST)
    assert harness.matched(LONG_A) == [DISK] * 4


def test_what_is_in_host_memory_already_is_held_too(harness: Harness) -> None:
    first = harness.prefetch(LONG_A)
    assert harness.cache.drain()
    second = harness.prefetch(LONG_A)
    assert second.ready
    harness.end_prefetch(first)
    harness.cache.clear(HOST)
    assert harness.matched(LONG_A) == [HOST] * 4


def test_nothing_is_read_twice(harness: Harness) -> None:
    harness.storage.open_reads.clear()
    harness.prefetch(LONG_A)
    harness.prefetch([*A, 5])
    request = harness.ask(LONG_A)
    harness.storage.open_reads.set()
    assert harness.cache.drain()
    assert [len(keys) for keys in harness.storage.reads] == [2, 2]
    assert request.lease.num_shared == 4
    assert not request.lease.broken


def test_what_was_not_begun_is_not_read_after_the_end(harness: Harness) -> None:
    harness.storage.open_reads.clear()
    prefetch = harness.prefetch(LONG_A)
    assert harness.storage.is_reading.wait(60)
    harness.end_prefetch(prefetch)
    harness.check()
    assert len(harness.cache._ladder._transfers.in_flight.all) == 1
    harness.storage.open_reads.set()
    assert harness.cache.drain()
    assert len(harness.storage.reads) == 1
    assert harness.matched(LONG_A) == [HOST, HOST, DISK, DISK]


def test_what_somebody_else_wants_is_read_to_the_end(harness: Harness) -> None:
    harness.storage.open_reads.clear()
    first, second = harness.prefetch(LONG_A), harness.prefetch([*A, 5])
    harness.end_prefetch(first)
    harness.storage.open_reads.set()
    assert harness.cache.drain()
    assert second.ready
    assert harness.matched(LONG_A) == [HOST] * 4


def test_a_load_does_not_wait_for_others_prefetch(harness: Harness) -> None:
    """It waits for the piece that is being read, and overtakes the next one."""
    harness.storage.open_reads.clear()
    harness.prefetch(LONG_A)
    assert harness.storage.is_reading.wait(60)
    request = harness.ask(LONG_B)
    harness.storage.open_reads.set()
    assert harness.cache.drain()
    harness.check_request(request)
    order = [keys[0] in harness.storage.reads[0] for keys in harness.storage.reads]
    ours = {harness.cache._index.key(block) for block in request.lease.blocks}
    read = [bool(ours.intersection(keys)) for keys in harness.storage.reads]
    assert read == [False, True, True, False]
    assert order == [True, False, False, False]


def test_waiting_requests_hold_half_of_the_host_tier_at_most(
    make_harness: MakeHarness, shelf: StoredBlocks
) -> None:
    harness = make_harness(disk_blocks=30, shelf=shelf, host_blocks=10)
    first = harness.prefetch(LONG_A)
    assert len(first.blocks) == 4
    assert harness.prefetch(LONG_B) is None, "ask again later"
    assert harness.cache.drain()
    harness.end_prefetch(first)
    assert harness.prefetch(LONG_B) is not None
    assert harness.cache.drain()
    harness.check()


def test_a_prompt_longer_than_that_is_prefetched_in_part(
    make_harness: MakeHarness, shelf: StoredBlocks
) -> None:
    harness = make_harness(disk_blocks=30, shelf=shelf, host_blocks=6)
    harness.prefetch(LONG_A)
    assert harness.cache.drain()
    assert harness.matched(LONG_A) == [HOST, HOST, HOST, DISK]


def test_a_block_that_can_not_be_read_leaves_the_others(harness: Harness) -> None:
    harness.storage.open_reads.clear()
    prefetch = harness.prefetch(LONG_A)
    *_, last = harness.cache.match(b"namespace", harness.ask(LONG_A, load=False).labels).blocks
    harness.storage.spoiled.add(harness.cache._index.key(last))
    harness.storage.open_reads.set()
    assert harness.cache.drain()
    assert prefetch.ready
    assert prefetch.broken
    assert harness.matched(LONG_A) == [HOST] * 3


def test_without_storage_there_is_nothing_to_wait_for(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.serve(LONG_A)
    prefetch = harness.prefetch(LONG_A)
    assert prefetch.ready
    assert not harness.cache.is_worth_waiting(prefetch)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (PrefetchPolicy.BEST_EFFORT, [False, False, False, False]),
        (PrefetchPolicy.TIMEOUT, [True, False, False, False]),
        (PrefetchPolicy.WAIT_COMPLETE, [True, True, False, False]),
    ],
)
def test_policies_say_how_long_a_request_waits(
    make_harness: MakeHarness, shelf: StoredBlocks, policy: PrefetchPolicy, expected: list[bool]
) -> None:
    """Wait times: none, until the time-out, until the loads' deadline, or until all has arrived."""
    harness = make_harness(disk_blocks=30, shelf=shelf, prefetch_policy=policy)
    harness.storage.open_reads.clear()
    prefetch = harness.prefetch(LONG_A)
    waits = []
    for seconds in (0.0, 2.0, 1000.0):
        harness.clock.now += seconds
        waits.append(harness.cache.is_worth_waiting(prefetch))
    harness.clock.now -= 1002.0
    harness.storage.open_reads.set()
    assert harness.cache.drain()
    waits.append(harness.cache.is_worth_waiting(prefetch))
    assert waits == expected


def test_a_withdrawn_read_is_no_failure(harness: Harness) -> None:
    harness.storage.open_reads.clear()
    prefetch = harness.prefetch(LONG_A)
    assert harness.storage.is_reading.wait(60)
    harness.end_prefetch(prefetch)
    harness.storage.open_reads.set()
    assert harness.cache.drain()
    failed = harness.cache.metrics.registry.get_sample_value(
        "kvtier_failed_copies_total", {"src": DISK, "dst": HOST}
    )
    assert failed is None


def test_unknown_policy_and_bad_timeout_are_refused(harness: Harness) -> None:
    with pytest.raises(ConfigError, match="prefetch_policy"):
        replace(harness.cache.config, prefetch_policy="eager")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="prefetch_timeout_s"):
        replace(harness.cache.config, prefetch_timeout_s=0)


# -- without host memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", PrefetchPolicy)
def test_request_waits_for_its_turn_where_there_is_no_host_tier(
    make_harness: MakeHarness, policy: PrefetchPolicy
) -> None:
    """There is nothing to read, so there is no wait, and nothing is held."""
    harness = make_harness(host_blocks=0, prefetch_policy=policy)
    harness.serve(LONG_A)
    prefetch = harness.prefetch(LONG_A)
    assert prefetch is not None
    assert prefetch.ready
    assert not harness.cache.is_worth_waiting(prefetch)
    assert hits(harness, LONG_A) == {DEVICE: 4}
    harness.end_prefetch(prefetch)
    harness.check()
