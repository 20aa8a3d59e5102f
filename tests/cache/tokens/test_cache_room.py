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
from tests.cache.tokens.harness import GROUP, NS, A, B, C, Harness, count

LONG = list(range(20))
MakeHarness = Callable[..., Harness]


# -- write policies --------------------------------------------------------------------------------


def test_write_through_stores_at_commit(harness: Harness) -> None:
    request = harness.start(A)
    harness.compute(request, 4)
    harness.cache.commit(request.lease, 2)
    assert harness.cache.drain()
    assert harness.held(HOST) == 2
    harness.cache.commit(request.lease, 4)
    assert harness.cache.drain()
    assert harness.held(HOST) == 4
    assert harness.device.num_copies[Direction.STORE] == 2


def test_blocks_wait_until_there_are_enough_to_store(make_harness: MakeHarness) -> None:
    harness = make_harness(store_batch_bytes=3 * GROUP.bytes_per_block)
    request = harness.start(A)
    harness.compute(request, 4)
    for num_blocks, num_stored in ((2, 0), (3, 3), (4, 3)):
        harness.cache.commit(request.lease, num_blocks)
        assert harness.cache.drain()
        assert harness.held(HOST) == num_stored
    harness.release(request)
    assert harness.cache.drain()
    assert harness.held(HOST) == 4, "the rest, when the request ends"
    assert harness.device.num_copies[Direction.STORE] == 2


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_selective_stores_at_the_nth_use(make_harness: MakeHarness, uses: int) -> None:
    harness = make_harness(WritePolicy.WRITE_THROUGH_SELECTIVE, store_after_uses=uses)
    for _ in range(uses - 1):
        harness.serve([*A, 9])
        assert harness.held(HOST) == 0
    harness.serve([*A, 9])
    assert harness.held(HOST) == 4


def test_selective_stores_only_the_part_that_is_used_often(make_harness: MakeHarness) -> None:
    harness = make_harness(WritePolicy.WRITE_THROUGH_SELECTIVE)
    harness.serve([*A, *B])
    harness.serve([*A, *C])
    assert harness.held(HOST) == 4
    harness.lose_the_device()
    assert harness.matched([*A, *B]) == [HOST] * 4


def test_write_back_stores_on_eviction(make_harness: MakeHarness) -> None:
    harness = make_harness(WritePolicy.WRITE_BACK, device_blocks=6)
    harness.serve(A)
    assert harness.held(HOST) == 0
    harness.serve(B)
    assert harness.held(HOST) > 0
    assert len(harness.matched(A)) == 4
    harness.finish(harness.start([*A, 9]))


def test_write_back_that_takes_too_long_keeps_the_block(make_harness: MakeHarness) -> None:
    harness = make_harness(WritePolicy.WRITE_BACK, device_blocks=6, load_deadline_s=0.01)
    harness.serve([*A, 9])
    harness.device.hold(Direction.STORE)
    assert harness.fetch(B) is None, "the only room is still being read"
    assert harness.matched(A) == [DEVICE] * 4
    harness.device.release()
    assert harness.cache.drain()
    harness.check()
    assert harness.held(HOST) == 3
    assert harness.fetch(B) is not None


def test_write_back_whose_store_fails_loses_the_block_and_nothing_else(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(WritePolicy.WRITE_BACK, device_blocks=6)
    harness.serve(A)
    harness.device.fail_half_way(Direction.STORE)
    harness.serve(B)
    harness.check()
    assert harness.held(HOST) == 0
    assert len(harness.matched(B)) == 4


def test_without_a_host_tier_blocks_are_just_evicted(make_harness: MakeHarness) -> None:
    for policy in WritePolicy:
        harness = make_harness(policy, host_blocks=0, device_blocks=6)
        assert harness.tiers == (DEVICE,)
        harness.serve(A)
        harness.serve(B)
        assert len(harness.matched(B)) == 4


# -- capacity --------------------------------------------------------------------------------------


def test_refusal_is_none_and_leaks_nothing(harness: Harness) -> None:
    holding = harness.start(LONG)
    before = harness.used()
    assert harness.fetch(A) is None
    assert harness.used() == before
    harness.check()
    harness.release(holding)
    assert harness.fetch(A) is not None


def test_refusal_evicts_nothing(harness: Harness) -> None:
    """If evictions cannot make enough room, nothing is evicted."""
    harness.serve([*B, 9])
    harness.lose_the_device()
    harness.serve(A)
    harness.device.hold(Direction.LOAD)
    loading = harness.ask([*B, 9])
    harness.release(loading)
    assert harness.fetch(list(range(50, 74))) is None
    assert harness.matched(A) == [DEVICE] * 4


def test_prompt_that_was_used_last_stays(harness: Harness) -> None:
    for prompt in (A, B, A):
        harness.serve(prompt)
    harness.start(LONG[:16])
    assert harness.matched(A) == [DEVICE] * 4
    assert harness.matched(B) == [DEVICE, HOST, HOST, HOST]


def test_a_block_more_leaves_where_that_gives_neighbours(make_harness: MakeHarness) -> None:
    """Attention reads neighbouring slots in place, and gathers all others."""
    harness = make_harness(device_blocks=10)
    for token in (1, 2, 3):
        harness.serve([token, token, 0])
    assert harness.pool.longest_run() == 7
    slots = harness.ask([4] * 17).lease.slots
    assert slots == list(range(slots[0], slots[0] + 9))
    assert harness.matched([3, 3]) == [HOST], "two had to leave, and a third lay in between"


def leave_holes(harness: Harness) -> None:
    """Fill the pool of 20 so that every other slot is free afterwards."""
    requests = [harness.start([token, token, 0]) for token in range(10)]
    for request in requests:
        harness.finish(request)
    assert harness.held(DEVICE) == 10
    assert harness.pool.longest_run() == 1


def test_older_blocks_leave_until_there_are_neighbours(make_harness: MakeHarness) -> None:
    """Every second slot is free. A request that fits in them still gets adjacent slots."""
    harness = make_harness(device_blocks=20)
    leave_holes(harness)
    slots = harness.ask([99] * 7).lease.slots
    assert slots == list(range(slots[0], slots[0] + 4))
    assert harness.held(DEVICE) == 7, "more left than the run lacked"


def test_nothing_leaves_for_neighbours_where_no_tier_keeps_a_copy(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(device_blocks=20, host_blocks=0)
    leave_holes(harness)
    assert harness.ask([99] * 7).lease.slots
    assert harness.held(DEVICE) == 10


def test_request_larger_than_the_pool_is_refused(harness: Harness) -> None:
    assert harness.fetch(list(range(40))) is None
    harness.check()


def test_held_prefix_survives_everything(harness: Harness) -> None:
    harness.serve(A)
    request = harness.start(A)
    for prompt in (B, C, LONG[:8]):
        harness.serve(prompt)
    harness.cache.clear(DEVICE)
    harness.cache.clear(HOST)
    harness.check_request(request)
    assert harness.matched(A)[:3] == [DEVICE] * 3


@pytest.mark.parametrize("policy", WritePolicy)
def test_host_far_too_small_costs_hits_not_requests(
    make_harness: MakeHarness, policy: WritePolicy
) -> None:
    harness = make_harness(policy, host_blocks=2)
    for prompt in (A, B, C, LONG, A, LONG, B):
        harness.serve([*prompt, 9])
        assert harness.held(HOST) <= 2
    if policy is not WritePolicy.WRITE_BACK:
        assert count(harness.cache.metrics, "kvtier_refused_blocks_total", tier=HOST) > 0


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_host_too_small_for_a_prompt_keeps_its_beginning(
    make_harness: MakeHarness, policy: WritePolicy
) -> None:
    """The tail of a prompt is worth nothing without its beginning."""
    harness = make_harness(policy, host_blocks=6)
    for _ in range(3):
        harness.serve([*LONG, 9])
        if policy is WritePolicy.WRITE_BACK:
            harness.lose_the_device()
    harness.lose_the_device()
    assert harness.matched(LONG) == [HOST] * 6


def test_demotion_block_by_block_keeps_the_beginning_of_a_prompt(make_harness: MakeHarness) -> None:
    harness = make_harness(WritePolicy.WRITE_BACK, host_blocks=6)
    harness.serve([*LONG, 9])
    harness.lose_the_device()
    assert harness.matched(LONG) == [HOST] * 6
    harness.serve([*LONG, 9])
    for _ in range(10):
        harness.cache._ladder.evict(DEVICE, 1)
    assert harness.cache.drain()
    assert harness.matched(LONG) == [HOST] * 6


def test_demotion_of_several_prompts_keeps_their_beginnings(make_harness: MakeHarness) -> None:
    harness = make_harness(WritePolicy.WRITE_BACK, host_blocks=8)
    first, second = [*A, 9, 9], [*B, 9, 9]
    for prompt in (first, second):
        harness.serve([*prompt[:8], 0])
    harness.lose_the_device()
    for prompt in (first, second):
        harness.serve([*prompt, 0])
    harness.lose_the_device()
    assert harness.matched(first) == harness.matched(second) == [HOST] * 4


# -- other guarantees ------------------------------------------------------------------------------


def test_swapped_block_is_noticed(harness: Harness) -> None:
    """Negative control: the checks of these tests can fail."""
    harness.serve(A)
    slots = harness.start(A).lease.slots
    content = harness.block_bytes.read(harness.pool.memory, harness.pool.layout, slots[1])
    harness.block_bytes.write(harness.pool.memory, harness.pool.layout, slots[2], content)
    with pytest.raises(AssertionError, match="wrong bytes"):
        harness.check_tiers(harness.contents())
    with pytest.raises(AssertionError, match="wrong bytes in block 2"):
        harness.check_request(harness.requests[0])
    right = harness.expected(harness.requests[0], 2)
    harness.block_bytes.write(harness.pool.memory, harness.pool.layout, slots[2], right)


def test_flipped_bit_in_a_load_is_noticed(harness: Harness) -> None:
    """Negative control for loads. Lower tiers check the stored bytes."""
    harness.put_on_host(A)
    harness.device.flip(Direction.LOAD)
    harness.device.release()
    request = harness.start([*A, 9])
    with pytest.raises(AssertionError, match="wrong bytes"):
        harness.check_request(request)
    expected = [harness.expected(request, position) for position in range(4)]
    for slot, block in zip(request.lease.slots, expected, strict=False):
        harness.block_bytes.write(harness.pool.memory, harness.pool.layout, slot, block)


def test_every_request_is_recorded(harness: Harness) -> None:
    harness.serve([*A, 9])
    harness.lose_the_device()
    request = harness.serve([*A, 9])
    record = request.lease.record
    assert record.num_asked_blocks == 4
    assert sum(record.hit_blocks.values()) == 4
    assert record.load_bytes == 4 * GROUP.bytes_per_block
    metrics = harness.cache.update_metrics()
    assert count(metrics, "kvtier_requests_total") == 2
    assert count(metrics, "kvtier_prompt_blocks_total") == 8
    assert count(metrics, "kvtier_hit_blocks_total", tier=HOST) == 4
    assert count(metrics, "kvtier_copied_bytes_total", src=HOST, dst=DEVICE) == record.load_bytes
    assert count(metrics, "kvtier_copied_bytes_total", src=DEVICE, dst=HOST) == record.load_bytes
    assert count(metrics, "kvtier_evicted_blocks_total", tier=DEVICE) == 4
    assert count(metrics, "kvtier_used_slots", tier=HOST) == 4
    assert count(metrics, "kvtier_slots", tier=DEVICE) == 14
    assert count(metrics, "kvtier_load_seconds_count") == 1


def test_cost_of_a_load_is_learnt_and_used(harness: Harness) -> None:
    harness.serve([*A, 9])
    harness.lose_the_device()
    harness.serve([*A, 9])
    harness.cache.observe_prefill(0, 1, 1e-12)
    harness.lose_the_device()
    assert harness.start([*A, 9]).lease.num_shared == 0, "recomputing is cheaper by far"
    assert harness.device.num_copies[Direction.LOAD] == 1


def test_room_for_less_than_the_prompt_is_a_broken_promise(harness: Harness) -> None:
    with pytest.raises(UsageError, match="num_blocks=4 holds 8 tokens, the prompt has 9"):
        harness.cache.fetch(NS, [], num_tokens=9, num_blocks=4)
    assert harness.used() == (0, 0)


def test_drain_says_when_it_had_to_stop(harness: Harness) -> None:
    harness.put_on_host(A)
    assert harness.fetch([*A, 9]) is not None
    assert not harness.cache.drain(timeout_s=0.0)
    harness.device.release()
    assert harness.cache.drain()


def test_closed_cache_refuses_requests_and_takes_leases_back(harness: Harness) -> None:
    request = harness.start(A)
    harness.cache.close()
    with pytest.raises(Closed):
        harness.fetch(B)
    with pytest.raises(Closed):
        harness.cache.commit(request.lease, 4)
    harness.cache.release(request.lease)
    harness.cache.release(request.lease)


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


def test_bytes_of_blocks_depend_on_the_whole_prefix(harness: Harness) -> None:
    expected = harness.block_bytes.expected
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


def test_host_tier_is_used_while_it_opens(make_harness: MakeHarness) -> None:
    harness = make_harness(opens_in_steps=True, host_blocks=12)
    assert (harness.host.num_slots, harness.host.num_open) == (12, 2)
    harness.serve([*A, 9])
    assert harness.held(HOST) == 2, "the beginning of the prompt, for more has no room yet"
    harness.open_more()
    harness.lose_the_device()
    assert harness.start([*A, 9]).lease.num_shared == 2
    for request in list(harness.requests):
        harness.finish(request)
    assert harness.held(HOST) == 4
    harness.open_more()
    assert harness.used()[1] == 4
    assert harness.cache.num_slots()[HOST] == 12


def test_requests_that_wait_leave_half_of_the_open_slots(make_harness: MakeHarness) -> None:
    harness = make_harness(opens_in_steps=True, host_blocks=12, disk_blocks=20)
    harness.locking.grant_all()
    assert harness.host.arena.wait(60)
    harness.serve([*A, 9])
    shelf = harness.shelf
    harness = make_harness(opens_in_steps=True, host_blocks=12, disk_blocks=20, shelf=shelf)
    prefetch = harness.prefetch([*A, 9])
    assert prefetch is not None
    assert len(prefetch.blocks) == 1, "half of the two slots that are open"
    assert harness.cache.drain()
    harness.end_prefetch(prefetch)
    for _ in range(4):
        harness.open_more()
    prefetch = harness.prefetch([*A, 9])
    assert prefetch is not None
    assert len(prefetch.blocks) == 4
    assert harness.cache.drain()


def test_cache_that_is_closed_while_its_host_tier_opens(make_harness: MakeHarness) -> None:
    harness = make_harness(opens_in_steps=True, host_blocks=12)
    harness.serve([*A, 9])
    harness.open_more()
    harness.locking.grant_all()
    harness.cache.close()
    assert harness.locking.unlocked == harness.locking.locked
