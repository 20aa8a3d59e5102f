"""Write policies, capacity, and the remaining guarantees of the cache, one per test."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvtier.cache.tokens import Cache
from kvtier.core.config import CacheConfig
from kvtier.core.errors import Closed, ConfigError, UsageError
from kvtier.core.types import DEVICE, HOST, WritePolicy
from kvtier.devices import Direction
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import named_layout
from kvtier.testing import host_memory
from kvtier.tiers import DeviceTier
from tests.cache.tokens.world import GROUP, NS, A, B, C, World, count

LONG = list(range(20))
MakeWorld = Callable[..., World]


# -- write policies --------------------------------------------------------------------------------


def test_write_through_stores_at_commit(world: World) -> None:
    request = world.start(A)
    world.compute(request, 4)
    world.cache.commit(request.lease, 2)
    assert world.cache.drain()
    assert world.held(HOST) == 2
    world.cache.commit(request.lease, 4)
    assert world.cache.drain()
    assert world.held(HOST) == 4
    assert world.device.num_copies[Direction.STORE] == 2


def test_blocks_wait_until_there_are_enough_to_store(make_world: MakeWorld) -> None:
    world = make_world(store_batch_bytes=3 * GROUP.bytes_per_block)
    request = world.start(A)
    world.compute(request, 4)
    for num_blocks, num_stored in ((2, 0), (3, 3), (4, 3)):
        world.cache.commit(request.lease, num_blocks)
        assert world.cache.drain()
        assert world.held(HOST) == num_stored
    world.release(request)
    assert world.cache.drain()
    assert world.held(HOST) == 4, "the rest, when the request ends"
    assert world.device.num_copies[Direction.STORE] == 2


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_selective_stores_at_the_nth_use(make_world: MakeWorld, uses: int) -> None:
    world = make_world(WritePolicy.WRITE_THROUGH_SELECTIVE, store_after_uses=uses)
    for _ in range(uses - 1):
        world.serve([*A, 9])
        assert world.held(HOST) == 0
    world.serve([*A, 9])
    assert world.held(HOST) == 4


def test_selective_stores_only_the_part_that_is_used_often(make_world: MakeWorld) -> None:
    world = make_world(WritePolicy.WRITE_THROUGH_SELECTIVE)
    world.serve([*A, *B])
    world.serve([*A, *C])
    assert world.held(HOST) == 4
    world.lose_the_device()
    assert world.matched([*A, *B]) == [HOST] * 4


def test_write_back_stores_on_eviction(make_world: MakeWorld) -> None:
    world = make_world(WritePolicy.WRITE_BACK, device_blocks=6)
    world.serve(A)
    assert world.held(HOST) == 0
    world.serve(B)
    assert world.held(HOST) > 0
    assert len(world.matched(A)) == 4
    world.finish(world.start([*A, 9]))


def test_write_back_that_takes_too_long_keeps_the_block(make_world: MakeWorld) -> None:
    world = make_world(WritePolicy.WRITE_BACK, device_blocks=6, load_deadline_s=0.01)
    world.serve([*A, 9])
    world.device.hold(Direction.STORE)
    assert world.fetch(B) is None, "the only room is still being read"
    assert world.matched(A) == [DEVICE] * 4
    world.device.let_go()
    assert world.cache.drain()
    world.check()
    assert world.held(HOST) == 3
    assert world.fetch(B) is not None


def test_write_back_whose_store_fails_loses_the_block_and_nothing_else(
    make_world: MakeWorld,
) -> None:
    world = make_world(WritePolicy.WRITE_BACK, device_blocks=6)
    world.serve(A)
    world.device.fail_half_way(Direction.STORE)
    world.serve(B)
    world.check()
    assert world.held(HOST) == 0
    assert len(world.matched(B)) == 4


def test_without_a_host_tier_blocks_are_just_evicted(make_world: MakeWorld) -> None:
    for policy in WritePolicy:
        world = make_world(policy, host_blocks=0, device_blocks=6)
        assert world.tiers == (DEVICE,)
        world.serve(A)
        world.serve(B)
        assert len(world.matched(B)) == 4


# -- capacity --------------------------------------------------------------------------------------


def test_refusal_is_none_and_leaks_nothing(world: World) -> None:
    holding = world.start(LONG)
    before = world.used()
    assert world.fetch(A) is None
    assert world.used() == before
    world.check()
    world.release(holding)
    assert world.fetch(A) is not None


def test_refusal_evicts_nothing(world: World) -> None:
    """If evictions cannot make enough room, nothing is evicted."""
    world.serve([*B, 9])
    world.lose_the_device()
    world.serve(A)
    world.device.hold(Direction.LOAD)
    loading = world.ask([*B, 9])
    world.release(loading)
    assert world.fetch(list(range(50, 74))) is None
    assert world.matched(A) == [DEVICE] * 4


def test_prompt_that_was_used_last_stays(world: World) -> None:
    for prompt in (A, B, A):
        world.serve(prompt)
    world.start(LONG[:16])
    assert world.matched(A) == [DEVICE] * 4
    assert world.matched(B) == [DEVICE, HOST, HOST, HOST]


def test_a_block_more_leaves_where_that_gives_neighbours(make_world: MakeWorld) -> None:
    """Attention reads neighbouring slots in place, and gathers all others."""
    world = make_world(device_blocks=10)
    for token in (1, 2, 3):
        world.serve([token, token, 0])
    assert world.pool.longest_run() == 7
    slots = world.ask([4] * 17).lease.slots
    assert slots == list(range(slots[0], slots[0] + 9))
    assert world.matched([3, 3]) == [HOST], "two had to leave, and a third lay in between"


def leave_holes(world: World) -> None:
    """Fill the pool of 20 so that every other slot is free afterwards."""
    requests = [world.start([token, token, 0]) for token in range(10)]
    for request in requests:
        world.finish(request)
    assert world.held(DEVICE) == 10
    assert world.pool.longest_run() == 1


def test_older_blocks_leave_until_there_are_neighbours(make_world: MakeWorld) -> None:
    """Every second slot is free. A request that fits in them still gets adjacent slots."""
    world = make_world(device_blocks=20)
    leave_holes(world)
    slots = world.ask([99] * 7).lease.slots
    assert slots == list(range(slots[0], slots[0] + 4))
    assert world.held(DEVICE) == 7, "more left than the run lacked"


def test_nothing_leaves_for_neighbours_where_no_tier_keeps_a_copy(make_world: MakeWorld) -> None:
    world = make_world(device_blocks=20, host_blocks=0)
    leave_holes(world)
    assert world.ask([99] * 7).lease.slots
    assert world.held(DEVICE) == 10


def test_request_larger_than_the_pool_is_refused(world: World) -> None:
    assert world.fetch(list(range(40))) is None
    world.check()


def test_held_prefix_survives_everything(world: World) -> None:
    world.serve(A)
    request = world.start(A)
    for prompt in (B, C, LONG[:8]):
        world.serve(prompt)
    world.cache.clear(DEVICE)
    world.cache.clear(HOST)
    world.check_request(request)
    assert world.matched(A)[:3] == [DEVICE] * 3


@pytest.mark.parametrize("policy", WritePolicy)
def test_host_far_too_small_costs_hits_not_requests(
    make_world: MakeWorld, policy: WritePolicy
) -> None:
    world = make_world(policy, host_blocks=2)
    for prompt in (A, B, C, LONG, A, LONG, B):
        world.serve([*prompt, 9])
        assert world.held(HOST) <= 2
    if policy is not WritePolicy.WRITE_BACK:
        assert count(world.cache.metrics, "kvtier_refused_blocks_total", tier=HOST) > 0


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_host_too_small_for_a_prompt_keeps_its_beginning(
    make_world: MakeWorld, policy: WritePolicy
) -> None:
    """The tail of a prompt is worth nothing without its beginning."""
    world = make_world(policy, host_blocks=6)
    for _ in range(3):
        world.serve([*LONG, 9])
        if policy is WritePolicy.WRITE_BACK:
            world.lose_the_device()
    world.lose_the_device()
    assert world.matched(LONG) == [HOST] * 6


def test_demotion_block_by_block_keeps_the_beginning_of_a_prompt(make_world: MakeWorld) -> None:
    world = make_world(WritePolicy.WRITE_BACK, host_blocks=6)
    world.serve([*LONG, 9])
    world.lose_the_device()
    assert world.matched(LONG) == [HOST] * 6
    world.serve([*LONG, 9])
    for _ in range(10):
        world.cache._ladder.evict(DEVICE, 1)
    assert world.cache.drain()
    assert world.matched(LONG) == [HOST] * 6


def test_demotion_of_several_prompts_keeps_their_beginnings(make_world: MakeWorld) -> None:
    world = make_world(WritePolicy.WRITE_BACK, host_blocks=8)
    first, second = [*A, 9, 9], [*B, 9, 9]
    for prompt in (first, second):
        world.serve([*prompt[:8], 0])
    world.lose_the_device()
    for prompt in (first, second):
        world.serve([*prompt, 0])
    world.lose_the_device()
    assert world.matched(first) == world.matched(second) == [HOST] * 4


# -- other guarantees ------------------------------------------------------------------------------


def test_swapped_block_is_noticed(world: World) -> None:
    """Negative control: the checks of these tests can fail."""
    world.serve(A)
    slots = world.start(A).lease.slots
    content = world.block_bytes.read(world.pool.memory, world.pool.layout, slots[1])
    world.block_bytes.write(world.pool.memory, world.pool.layout, slots[2], content)
    with pytest.raises(AssertionError, match="wrong bytes"):
        world.check_tiers(world.contents())
    with pytest.raises(AssertionError, match="wrong bytes in block 2"):
        world.check_request(world.requests[0])
    right = world.expected(world.requests[0], 2)
    world.block_bytes.write(world.pool.memory, world.pool.layout, slots[2], right)


def test_flipped_bit_in_a_load_is_noticed(world: World) -> None:
    """Negative control for loads. Lower tiers check the stored bytes."""
    world.put_on_host(A)
    world.device.flip(Direction.LOAD)
    world.device.let_go()
    request = world.start([*A, 9])
    with pytest.raises(AssertionError, match="wrong bytes"):
        world.check_request(request)
    expected = [world.expected(request, position) for position in range(4)]
    for slot, block in zip(request.lease.slots, expected, strict=False):
        world.block_bytes.write(world.pool.memory, world.pool.layout, slot, block)


def test_every_request_is_recorded(world: World) -> None:
    world.serve([*A, 9])
    world.lose_the_device()
    request = world.serve([*A, 9])
    record = request.lease.record
    assert record.num_asked_blocks == 4
    assert sum(record.hit_blocks.values()) == 4
    assert record.load_bytes == 4 * GROUP.bytes_per_block
    metrics = world.cache.update_metrics()
    assert count(metrics, "kvtier_requests_total") == 2
    assert count(metrics, "kvtier_prompt_blocks_total") == 8
    assert count(metrics, "kvtier_hit_blocks_total", tier=HOST) == 4
    assert count(metrics, "kvtier_copied_bytes_total", src=HOST, dst=DEVICE) == record.load_bytes
    assert count(metrics, "kvtier_copied_bytes_total", src=DEVICE, dst=HOST) == record.load_bytes
    assert count(metrics, "kvtier_evicted_blocks_total", tier=DEVICE) == 4
    assert count(metrics, "kvtier_used_slots", tier=HOST) == 4
    assert count(metrics, "kvtier_slots", tier=DEVICE) == 14
    assert count(metrics, "kvtier_load_seconds_count") == 1


def test_cost_of_a_load_is_learnt_and_used(world: World) -> None:
    world.serve([*A, 9])
    world.lose_the_device()
    world.serve([*A, 9])
    world.cache.observe_prefill(0, 1, 1e-12)
    world.lose_the_device()
    assert world.start([*A, 9]).lease.num_shared == 0, "recomputing is cheaper by far"
    assert world.device.num_copies[Direction.LOAD] == 1


def test_room_for_less_than_the_prompt_is_a_broken_promise(world: World) -> None:
    with pytest.raises(UsageError, match="num_blocks=4 holds 8 tokens, the prompt has 9"):
        world.cache.fetch(NS, [], num_tokens=9, num_blocks=4)
    assert world.used() == (0, 0)


def test_drain_says_when_it_had_to_stop(world: World) -> None:
    world.put_on_host(A)
    assert world.fetch([*A, 9]) is not None
    assert not world.cache.drain(timeout_s=0.0)
    world.device.let_go()
    assert world.cache.drain()


def test_closed_cache_refuses_requests_and_takes_leases_back(world: World) -> None:
    request = world.start(A)
    world.cache.close()
    with pytest.raises(Closed):
        world.fetch(B)
    with pytest.raises(Closed):
        world.cache.commit(request.lease, 4)
    world.cache.release(request.lease)
    world.cache.release(request.lease)


def test_host_capacity_may_be_a_multiple_of_the_pool() -> None:
    layout = named_layout("layer_first", GROUP, 5)

    def make(capacity: str) -> Cache:
        pool = DeviceTier(host_memory(layout.nbytes), layout)
        return Cache(CacheConfig(host_capacity=capacity), CpuDevice(), pool)

    cache = make("2.5x")
    assert cache.used_slots() == {DEVICE: 0, HOST: 0}
    assert cache.num_slots() == {DEVICE: 5, HOST: 12}
    assert any("12 blocks" in line.found for line in cache.findings())
    cache.close()
    with pytest.raises(ConfigError, match="below one block"):
        make("0.01x")


def test_bytes_of_blocks_depend_on_the_whole_prefix(world: World) -> None:
    expected = world.block_bytes.expected
    made = [
        expected(b"n", [b"a", b"b"]),
        expected(b"n", [b"b"]),
        expected(b"m", [b"a", b"b"]),
        expected(b"n", [b"ab"]),
        expected(b"na", [b"b"]),
    ]
    assert len({block.tobytes() for block in made}) == len(made)
    assert np.array_equal(expected(b"n", [b"a", b"b"]), made[0])


# -- host memory that is not ready yet -------------------------------------------------------------


def test_host_tier_is_used_while_it_opens(make_world: MakeWorld) -> None:
    world = make_world(opens_in_steps=True, host_blocks=12)
    assert (world.host.num_slots, world.host.num_open) == (12, 2)
    world.serve([*A, 9])
    assert world.held(HOST) == 2, "the beginning of the prompt, for more has no room yet"
    world.open_more()
    world.lose_the_device()
    assert world.start([*A, 9]).lease.num_shared == 2
    for request in list(world.requests):
        world.finish(request)
    assert world.held(HOST) == 4
    world.open_more()
    assert world.used()[1] == 4
    assert world.cache.num_slots()[HOST] == 12


def test_requests_that_wait_leave_half_of_the_open_slots(make_world: MakeWorld) -> None:
    world = make_world(opens_in_steps=True, host_blocks=12, disk_blocks=20)
    world.locking.grant_all()
    assert world.host.arena.wait(60)
    world.serve([*A, 9])
    shelf = world.shelf
    world = make_world(opens_in_steps=True, host_blocks=12, disk_blocks=20, shelf=shelf)
    prefetch = world.prefetch([*A, 9])
    assert prefetch is not None
    assert len(prefetch.blocks) == 1, "half of the two slots that are open"
    assert world.cache.drain()
    world.end_prefetch(prefetch)
    for _ in range(4):
        world.open_more()
    prefetch = world.prefetch([*A, 9])
    assert prefetch is not None
    assert len(prefetch.blocks) == 4
    assert world.cache.drain()


def test_cache_that_is_closed_while_its_host_tier_opens(make_world: MakeWorld) -> None:
    world = make_world(opens_in_steps=True, host_blocks=12)
    world.serve([*A, 9])
    world.open_more()
    world.locking.grant_all()
    world.cache.close()
    assert world.locking.unlocked == world.locking.locked
