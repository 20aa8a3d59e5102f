"""Guarantees of the cache to a request, one per test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvtier.core.errors import UsageError
from kvtier.core.keys import Namespace, token_labels
from kvtier.core.types import DEVICE, HOST
from kvtier.devices import Direction
from tests.cache.tokens.world import BLOCK_SIZE, DEADLINE_S, GROUP, NS, A, B, World, count
from tests.kit.snapshot import snapshot

MakeWorld = Callable[..., World]


# -- reuse -----------------------------------------------------------------------------------------


def test_second_request_reuses_the_first_one_s_blocks(world: World) -> None:
    first = world.serve([*A, 9])
    second = world.start([*A, 9])
    assert second.lease.num_shared == 4
    assert second.lease.record.hit_blocks == {DEVICE: 4}
    assert first.lease.slots == []
    world.finish(second)
    assert world.device.num_copies[Direction.LOAD] == 0


def test_match_and_plan_change_nothing(world: World) -> None:
    world.serve([*A, 9])
    world.lose_the_device()
    labels, before = token_labels([*A, *B], BLOCK_SIZE), snapshot(world.cache)
    for _ in range(2):
        match = world.cache.match(NS, labels)
        assert world.cache.plan(match, len(A) + len(B)).num_reused_blocks == 4
        assert snapshot(world.cache) == before


def test_one_token_is_always_left_to_compute(world: World) -> None:
    world.serve(A)
    assert world.start(A).lease.num_shared == 3


def test_blocks_come_back_from_the_host_as_they_were(world: World) -> None:
    world.serve([*A, 9])
    world.lose_the_device()
    assert world.matched(A) == [HOST] * 4
    request = world.start([*A, 9])
    assert request.lease.num_shared == 4
    assert request.lease.record.hit_blocks == {HOST: 4}
    world.check_request(request)


def test_prefix_and_room_are_told_apart(world: World) -> None:
    world.serve(A)
    request = world.start([*A, *B])
    assert request.lease.num_shared == 4
    assert request.lease.room == request.lease.slots[4:]
    assert len(request.lease.slots) == 9


def test_load_false_reuses_only_what_is_on_the_device(world: World) -> None:
    world.serve([*A, 9])
    assert world.ask([*A, 9], load=False).lease.num_shared == 4
    world.release(world.requests[0])
    world.lose_the_device()
    request = world.ask([*A, 9], load=False)
    assert request.lease.ready
    assert request.lease.num_shared == 0


def test_partial_commits_are_reused_as_far_as_they_go(world: World) -> None:
    request = world.start([*A, 9])
    world.compute(request, 3)
    world.cache.commit(request.lease, 1)
    assert world.matched(A) == [DEVICE]
    world.cache.commit(request.lease, 3)
    world.cache.commit(request.lease, 3)
    world.cache.commit(request.lease, 0)
    assert world.matched(A) == [DEVICE] * 3
    world.check()


def test_commit_after_release_is_refused(world: World) -> None:
    request = world.start(A)
    world.release(request)
    with pytest.raises(UsageError, match="the lease was released; fetch the prompt again"):
        world.cache.commit(request.lease, 4)
    world.check()


@pytest.mark.parametrize("num_blocks", [-1, 5, 9])
def test_commit_of_blocks_that_the_lease_has_not_is_refused(world: World, num_blocks: int) -> None:
    request = world.start(A)
    world.compute(request, 4)
    with pytest.raises(UsageError, match=rf"num_blocks={num_blocks}.* from 0 to 4"):
        world.cache.commit(request.lease, num_blocks)
    assert world.matched(A) == []
    world.cache.commit(request.lease, 4)
    assert len(world.matched(A)) == 4


def test_commit_before_the_lease_is_ready_is_refused(world: World) -> None:
    world.put_on_host(A)
    request = world.ask([*A, 9])
    with pytest.raises(UsageError, match="not ready; poll"):
        world.cache.commit(request.lease, 4)
    world.device.let_go()


def test_lease_of_another_cache_is_refused(make_world: MakeWorld) -> None:
    ours, theirs = make_world(), make_world()
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
    world: World, numbers: tuple[int, int, int], message: str
) -> None:
    num_tokens, num_blocks, grain_blocks = numbers
    labels = token_labels(A, BLOCK_SIZE)
    with pytest.raises(UsageError, match=message):
        world.cache.fetch(NS, labels, num_tokens, num_blocks, grain_blocks)
    assert world.used() == (0, 0)


def test_namespace_salt_separates(make_world: MakeWorld) -> None:
    world = make_world(device_blocks=20)
    tenants = [
        Namespace("model", "main", "float16", GROUP.fingerprint, 2, salt=salt).digest
        for salt in ("", "one", "two")
    ]
    for namespace in tenants:
        request = world.start(A, namespace)
        assert request.lease.num_shared == 0
        world.finish(request)
    for namespace in tenants:
        assert len(world.matched(A, namespace)) == 4
    assert len({slot for n in tenants for slot in world.start(A, n).lease.slots[:3]}) == 9


def test_twins_are_deduplicated_at_commit(world: World) -> None:
    one, two = world.start([*A, 9]), world.start([*A, 9])
    assert set(one.lease.slots).isdisjoint(two.lease.slots)
    world.compute(one, 4)
    world.compute(two, 4)
    world.cache.commit(one.lease, 4)
    assert world.used()[0] == 10
    world.cache.commit(two.lease, 4)
    assert two.lease.slots[:4] == one.lease.slots[:4]
    assert world.used()[0] == 6
    world.check()


# -- loads in flight -------------------------------------------------------------------------------


def test_two_requests_share_a_load_in_flight(world: World) -> None:
    world.put_on_host(A)
    one, two = world.ask([*A, 9]), world.ask([*A, 8])
    assert not one.lease.ready
    assert not two.lease.ready
    assert two.lease.slots[:4] == one.lease.slots[:4]
    assert two.lease.record.load_bytes == 0
    world.device.let_go()
    assert world.cache.drain()
    assert world.device.num_copies[Direction.LOAD] == 1
    for request in (one, two):
        assert request.lease.ready
        assert not request.lease.broken
        world.check_request(request)


def test_load_goes_on_when_its_request_goes_away(world: World) -> None:
    world.put_on_host(A)
    request = world.ask([*A, 9])
    world.release(request)
    world.check()
    world.device.let_go()
    assert world.cache.drain()
    world.check()
    assert world.matched(A) == [DEVICE] * 4


def test_sources_of_a_load_can_not_be_evicted(world: World) -> None:
    world.put_on_host(A)
    request = world.ask([*A, 9])
    world.release(request)
    world.cache.clear(HOST)
    assert world.held(HOST) == 4
    world.device.let_go()
    assert world.cache.drain()
    world.cache.clear(HOST)
    assert world.held(HOST) == 0
    world.check()


def test_what_was_loaded_for_a_request_can_not_be_evicted(world: World) -> None:
    world.put_on_host([*A, 9])
    world.device.let_go()
    request = world.start([*A, 9])
    world.cache.clear(DEVICE)
    assert world.matched(A) == [DEVICE] * 4
    world.check_request(request)


@pytest.mark.parametrize("how", ["fail", "fail_half_way", "crash"])
def test_failed_load_breaks_the_lease_and_is_recomputed(world: World, how: str) -> None:
    world.put_on_host([*A, 9])
    getattr(world.device, how)(Direction.LOAD)
    world.device.let_go()
    broken = world.start([*A, 9])
    assert broken.lease.ready
    assert broken.lease.broken
    assert world.matched(A) == [HOST] * 4
    world.release(broken)
    again = world.ask([*A, 9], load=False)
    assert again.lease.ready
    assert not again.lease.broken
    assert again.lease.num_shared == 0
    world.finish(again)
    assert world.matched(A) == [DEVICE] * 4
    assert count(world.cache.metrics, "kvtier_failed_copies_total", src=HOST, dst=DEVICE) == 1


def test_failed_load_breaks_every_lease_that_waited_for_it(world: World) -> None:
    world.put_on_host(A)
    world.device.fail(Direction.LOAD)
    one, two = world.ask([*A, 9]), world.ask([*A, 8])
    world.device.let_go()
    assert world.cache.drain()
    assert one.lease.broken
    assert two.lease.broken


def test_late_load_is_given_up_and_arrives_for_others(world: World) -> None:
    world.put_on_host(A)
    late = world.ask([*A, 9])
    world.clock.now += DEADLINE_S - 1
    world.cache.poll()
    assert not late.lease.ready
    world.clock.now += 2
    world.cache.poll()
    assert late.lease.ready
    assert late.lease.broken
    assert count(world.cache.metrics, "kvtier_late_loads_total") == 1
    world.release(late)
    world.device.let_go()
    assert world.cache.drain()
    assert world.start([*A, 9]).lease.record.hit_blocks == {DEVICE: 4}


def test_what_is_recomputed_while_its_load_is_late_stays_private(world: World) -> None:
    """A block has two copies, one in flight. The lease keeps its own until the other arrives."""
    world.put_on_host(A)
    late = world.ask([*A, 9])
    world.clock.now += DEADLINE_S + 1
    world.cache.poll()
    world.release(late)
    again = world.ask([*A, 9], load=False)
    world.compute(again, 4)
    world.cache.commit(again.lease, 4)
    assert again.lease.num_shared == 0
    world.check()
    world.device.let_go()
    assert world.cache.drain()
    world.cache.commit(again.lease, 4)
    assert again.lease.num_shared == 4
    world.check()


def test_hole_left_by_a_failed_load_is_filled_by_recomputing(world: World) -> None:
    """A load fails whose blocks another load's blocks follow. The tail is found again later."""
    world.serve([*A, *B])
    world.lose_the_device()
    world.device.hold(Direction.LOAD)
    world.device.fail(Direction.LOAD)
    front, back = world.ask([*A, 9]), world.ask([*A, *B])
    world.device.let_go()
    assert world.cache.drain()
    assert front.lease.broken
    assert back.lease.broken
    for request in (front, back):
        world.release(request)
    assert world.matched([*A, *B]) == [HOST] * 4 + [DEVICE] * 3 + [HOST]
    world.finish(world.ask([*A, *B], load=False))
    assert world.matched([*A, *B]) == [DEVICE] * 8


def test_memory_from_which_a_copy_failed_twice_is_not_copied_from_again(world: World) -> None:
    world.put_on_host(A)
    for expected in ([HOST] * 4, []):
        world.device.hold(Direction.LOAD)
        world.device.fail(Direction.LOAD)
        request = world.ask([*A, 9])
        world.device.let_go()
        assert world.cache.drain()
        assert request.lease.broken
        world.release(request)
        world.cache.poll()
        assert world.matched(A) == expected
    world.finish(world.start([*A, 9]))
