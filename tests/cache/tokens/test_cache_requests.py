"""Guarantees of the cache to a request, one per test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvtier.core.errors import UsageError
from kvtier.core.keys import Namespace, token_labels
from kvtier.core.types import DEVICE, HOST
from kvtier.devices import Direction
from tests.cache.tokens.harness import BLOCK_SIZE, DEADLINE_S, GROUP, NS, A, B, Harness, count
from tests.kit.snapshot import snapshot

MakeHarness = Callable[..., Harness]


# -- reuse -----------------------------------------------------------------------------------------


def test_second_request_reuses_the_first_one_s_blocks(harness: Harness) -> None:
    first = harness.serve([*A, 9])
    second = harness.start([*A, 9])
    assert second.lease.num_shared == 4
    assert second.lease.record.hit_blocks == {DEVICE: 4}
    assert first.lease.slots == []
    harness.finish(second)
    assert harness.device.num_copies[Direction.LOAD] == 0


def test_match_and_plan_change_nothing(harness: Harness) -> None:
    harness.serve([*A, 9])
    harness.lose_the_device()
    labels, before = token_labels([*A, *B], BLOCK_SIZE), snapshot(harness.cache)
    for _ in range(2):
        match = harness.cache.match(NS, labels)
        assert harness.cache.plan(match, len(A) + len(B)).num_reused_blocks == 4
        assert snapshot(harness.cache) == before


def test_one_token_is_always_left_to_compute(harness: Harness) -> None:
    harness.serve(A)
    assert harness.start(A).lease.num_shared == 3


def test_blocks_come_back_from_the_host_as_they_were(harness: Harness) -> None:
    harness.serve([*A, 9])
    harness.lose_the_device()
    assert harness.matched(A) == [HOST] * 4
    request = harness.start([*A, 9])
    assert request.lease.num_shared == 4
    assert request.lease.record.hit_blocks == {HOST: 4}
    harness.check_request(request)


def test_prefix_and_room_are_told_apart(harness: Harness) -> None:
    harness.serve(A)
    request = harness.start([*A, *B])
    assert request.lease.num_shared == 4
    assert request.lease.reserved_slots == request.lease.slots[4:]
    assert len(request.lease.slots) == 9


def test_load_false_reuses_only_what_is_on_the_device(harness: Harness) -> None:
    harness.serve([*A, 9])
    assert harness.ask([*A, 9], load=False).lease.num_shared == 4
    harness.release(harness.requests[0])
    harness.lose_the_device()
    request = harness.ask([*A, 9], load=False)
    assert request.lease.ready
    assert request.lease.num_shared == 0


def test_partial_commits_are_reused_as_far_as_they_go(harness: Harness) -> None:
    request = harness.start([*A, 9])
    harness.compute(request, 3)
    harness.cache.commit(request.lease, 1)
    assert harness.matched(A) == [DEVICE]
    harness.cache.commit(request.lease, 3)
    harness.cache.commit(request.lease, 3)
    harness.cache.commit(request.lease, 0)
    assert harness.matched(A) == [DEVICE] * 3
    harness.check()


def test_commit_after_release_is_refused(harness: Harness) -> None:
    request = harness.start(A)
    harness.release(request)
    with pytest.raises(UsageError, match="the lease was released; fetch the prompt again"):
        harness.cache.commit(request.lease, 4)
    harness.check()


@pytest.mark.parametrize("num_blocks", [-1, 5, 9])
def test_commit_of_blocks_that_the_lease_has_not_is_refused(
    harness: Harness, num_blocks: int
) -> None:
    request = harness.start(A)
    harness.compute(request, 4)
    with pytest.raises(UsageError, match=rf"num_blocks={num_blocks}.* from 0 to 4"):
        harness.cache.commit(request.lease, num_blocks)
    assert harness.matched(A) == []
    harness.cache.commit(request.lease, 4)
    assert len(harness.matched(A)) == 4


def test_commit_before_the_lease_is_ready_is_refused(harness: Harness) -> None:
    harness.put_on_host(A)
    request = harness.ask([*A, 9])
    with pytest.raises(UsageError, match="not ready; poll"):
        harness.cache.commit(request.lease, 4)
    harness.device.release()


def test_lease_of_another_cache_is_refused(make_harness: MakeHarness) -> None:
    ours, theirs = make_harness(), make_harness()
    request = theirs.start(A)
    for call in (partial(ours.cache.commit, num_blocks=4), ours.cache.release):
        with pytest.raises(UsageError, match="belongs to another cache"):
            call(request.lease)
    theirs.finish(request)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((8, 3, 1), "num_blocks=3 holds 6 tokens, the prompt has 8; give at least 4"),
        ((8, -2, 1), "num_blocks=-2 holds 0 tokens, the prompt has 8; give at least 4"),
        ((7, 4, 1), "num_tokens=7 is less than the 4 labels stand for, at block_size=2"),
        ((8, 4, 0), "grain_blocks=0 is below 1"),
    ],
)
def test_request_whose_numbers_do_not_fit_is_refused(
    harness: Harness, numbers: tuple[int, int, int], message: str
) -> None:
    num_tokens, num_blocks, grain_blocks = numbers
    labels = token_labels(A, BLOCK_SIZE)
    with pytest.raises(UsageError, match=message):
        harness.cache.fetch(NS, labels, num_tokens, num_blocks, grain_blocks)
    assert harness.used() == (0, 0)


def test_namespace_salt_separates(make_harness: MakeHarness) -> None:
    harness = make_harness(device_blocks=20)
    tenants = [
        Namespace("model", "main", "float16", GROUP.fingerprint, 2, salt=salt).digest
        for salt in ("", "one", "two")
    ]
    for namespace in tenants:
        request = harness.start(A, namespace)
        assert request.lease.num_shared == 0
        harness.finish(request)
    for namespace in tenants:
        assert len(harness.matched(A, namespace)) == 4
    assert len({slot for n in tenants for slot in harness.start(A, n).lease.slots[:3]}) == 9


def test_twins_are_deduplicated_at_commit(harness: Harness) -> None:
    one, two = harness.start([*A, 9]), harness.start([*A, 9])
    assert set(one.lease.slots).isdisjoint(two.lease.slots)
    harness.compute(one, 4)
    harness.compute(two, 4)
    harness.cache.commit(one.lease, 4)
    assert harness.used()[0] == 10
    harness.cache.commit(two.lease, 4)
    assert two.lease.slots[:4] == one.lease.slots[:4]
    assert harness.used()[0] == 6
    harness.check()


# -- loads in flight -------------------------------------------------------------------------------


def test_two_requests_share_a_load_in_flight(harness: Harness) -> None:
    harness.put_on_host(A)
    one, two = harness.ask([*A, 9]), harness.ask([*A, 8])
    assert not one.lease.ready
    assert not two.lease.ready
    assert two.lease.slots[:4] == one.lease.slots[:4]
    assert two.lease.record.load_bytes == 0
    harness.device.release()
    assert harness.cache.drain()
    assert harness.device.num_copies[Direction.LOAD] == 1
    for request in (one, two):
        assert request.lease.ready
        assert not request.lease.broken
        harness.check_request(request)


def test_load_goes_on_when_its_request_goes_away(harness: Harness) -> None:
    harness.put_on_host(A)
    request = harness.ask([*A, 9])
    harness.release(request)
    harness.check()
    harness.device.release()
    assert harness.cache.drain()
    harness.check()
    assert harness.matched(A) == [DEVICE] * 4


def test_sources_of_a_load_can_not_be_evicted(harness: Harness) -> None:
    harness.put_on_host(A)
    request = harness.ask([*A, 9])
    harness.release(request)
    harness.cache.clear(HOST)
    assert harness.held(HOST) == 4
    harness.device.release()
    assert harness.cache.drain()
    harness.cache.clear(HOST)
    assert harness.held(HOST) == 0
    harness.check()


def test_what_was_loaded_for_a_request_can_not_be_evicted(harness: Harness) -> None:
    harness.put_on_host([*A, 9])
    harness.device.release()
    request = harness.start([*A, 9])
    harness.cache.clear(DEVICE)
    assert harness.matched(A) == [DEVICE] * 4
    harness.check_request(request)


@pytest.mark.parametrize("how", ["fail", "fail_half_way", "crash"])
def test_failed_load_breaks_the_lease_and_is_recomputed(harness: Harness, how: str) -> None:
    harness.put_on_host([*A, 9])
    getattr(harness.device, how)(Direction.LOAD)
    harness.device.release()
    broken = harness.start([*A, 9])
    assert broken.lease.ready
    assert broken.lease.broken
    assert harness.matched(A) == [HOST] * 4
    harness.release(broken)
    again = harness.ask([*A, 9], load=False)
    assert again.lease.ready
    assert not again.lease.broken
    assert again.lease.num_shared == 0
    harness.finish(again)
    assert harness.matched(A) == [DEVICE] * 4
    assert count(harness.cache.metrics, "kvtier_failed_copies_total", src=HOST, dst=DEVICE) == 1


def test_failed_load_breaks_every_lease_that_waited_for_it(harness: Harness) -> None:
    harness.put_on_host(A)
    harness.device.fail(Direction.LOAD)
    one, two = harness.ask([*A, 9]), harness.ask([*A, 8])
    harness.device.release()
    assert harness.cache.drain()
    assert one.lease.broken
    assert two.lease.broken


def test_late_load_is_given_up_and_arrives_for_others(harness: Harness) -> None:
    harness.put_on_host(A)
    late = harness.ask([*A, 9])
    harness.clock.now += DEADLINE_S - 1
    harness.cache.poll()
    assert not late.lease.ready
    harness.clock.now += 2
    harness.cache.poll()
    assert late.lease.ready
    assert late.lease.broken
    assert count(harness.cache.metrics, "kvtier_late_loads_total") == 1
    harness.release(late)
    harness.device.release()
    assert harness.cache.drain()
    assert harness.start([*A, 9]).lease.record.hit_blocks == {DEVICE: 4}


def test_what_is_recomputed_while_its_load_is_late_stays_private(harness: Harness) -> None:
    """A block has two copies, one in flight. The lease keeps its own until the other arrives."""
    harness.put_on_host(A)
    late = harness.ask([*A, 9])
    harness.clock.now += DEADLINE_S + 1
    harness.cache.poll()
    harness.release(late)
    again = harness.ask([*A, 9], load=False)
    harness.compute(again, 4)
    harness.cache.commit(again.lease, 4)
    assert again.lease.num_shared == 0
    harness.check()
    harness.device.release()
    assert harness.cache.drain()
    harness.cache.commit(again.lease, 4)
    assert again.lease.num_shared == 4
    harness.check()


def test_hole_left_by_a_failed_load_is_filled_by_recomputing(harness: Harness) -> None:
    """A load fails whose blocks another load's blocks follow. The tail is found again later."""
    harness.serve([*A, *B])
    harness.lose_the_device()
    harness.device.hold(Direction.LOAD)
    harness.device.fail(Direction.LOAD)
    front, back = harness.ask([*A, 9]), harness.ask([*A, *B])
    harness.device.release()
    assert harness.cache.drain()
    assert front.lease.broken
    assert back.lease.broken
    for request in (front, back):
        harness.release(request)
    assert harness.matched([*A, *B]) == [HOST] * 4 + [DEVICE] * 3 + [HOST]
    harness.finish(harness.ask([*A, *B], load=False))
    assert harness.matched([*A, *B]) == [DEVICE] * 8


def test_memory_from_which_a_copy_failed_twice_is_not_copied_from_again(harness: Harness) -> None:
    harness.put_on_host(A)
    for expected in ([HOST] * 4, []):
        harness.device.hold(Direction.LOAD)
        harness.device.fail(Direction.LOAD)
        request = harness.ask([*A, 9])
        harness.device.release()
        assert harness.cache.drain()
        assert request.lease.broken
        harness.release(request)
        harness.cache.poll()
        assert harness.matched(A) == expected
    harness.finish(harness.start([*A, 9]))
