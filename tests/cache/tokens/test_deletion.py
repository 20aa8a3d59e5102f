"""Deletion of prompts through the whole cache: no tier returns them, even after a restart."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.cache.deletion import Deletion
from kvtier.core.keys import token_labels
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.testing import StoredBlocks

from .world import BLOCK_SIZE, NS, A, B, World, until

MakeWorld = Callable[..., World]
LONG, OTHER = [*A, 9], [*B, 9]
"""Four blocks each."""
TENANT = b"another tenant"


def delete(world: World, tokens: list[int], namespace: bytes = NS) -> Deletion:
    done = world.cache.delete(namespace, token_labels(tokens, BLOCK_SIZE))
    world.check()
    return done


def wait_for(world: World, deletion: Deletion) -> None:
    until(world, lambda: world.cache.is_deleted(deletion))
    world.check()


def located(world: World, tokens: list[int]) -> list[str]:
    return world.cache.locate(NS, token_labels(tokens, BLOCK_SIZE))


def test_a_deleted_prompt_is_in_no_tier_and_no_other_prompt_is_missing(
    make_world: MakeWorld,
) -> None:
    world = make_world(disk_blocks=30)
    world.serve(LONG)
    world.serve(OTHER)
    assert located(world, LONG) == ["memory"] * 4
    wait_for(world, delete(world, LONG))
    assert located(world, LONG) == ["nowhere"] * 4
    assert world.matched(LONG) == []
    assert world.matched(OTHER) == [DEVICE] * 4
    assert [world.held(tier) for tier in (DEVICE, HOST, DISK)] == [4, 4, 4]
    assert len(world.shelf.blocks) == 4
    assert world.start(LONG).lease.num_shared == 0


def test_what_an_earlier_process_left_is_deleted_by_prompt_and_all(make_world: MakeWorld) -> None:
    shelf = StoredBlocks()
    before = make_world(disk_blocks=30, shelf=shelf)
    before.serve(LONG)
    before.serve(OTHER)
    world = make_world(disk_blocks=30, shelf=shelf.copy())
    wait_for(world, delete(world, LONG))
    assert len(world.shelf.blocks) == 4
    request = world.start(OTHER)
    assert request.lease.num_shared == 4
    world.finish(request)
    wait_for(world, world.cache.delete_all(lambda _: True))
    assert world.shelf.blocks == {}
    assert world.matched(OTHER) == []


def test_a_namespace_is_deleted_and_others_stay(make_world: MakeWorld) -> None:
    world = make_world(disk_blocks=30)
    world.serve(LONG)
    world.serve(LONG, namespace=TENANT)
    used = world.cache.used_by_namespace()
    assert used.keys() == {NS, TENANT}
    assert used[TENANT] == used[NS]
    assert used[NS][HOST] == 4 * world.cache.group.bytes_per_block
    wait_for(world, world.cache.delete_all(lambda namespace: namespace == TENANT))
    assert world.matched(LONG, TENANT) == []
    assert world.matched(LONG) == [DEVICE] * 4
    assert len(world.shelf.blocks) == 4


def test_blocks_in_use_are_not_found_and_go_when_their_request_ends(make_world: MakeWorld) -> None:
    world = make_world(disk_blocks=30)
    world.serve(LONG)
    running = world.start(LONG)
    deletion = delete(world, LONG)
    assert world.cache.drain()
    assert not world.cache.is_deleted(deletion)
    assert world.matched(LONG) == []
    late = world.start(LONG)
    assert late.lease.num_shared == 0
    for request in (late, running):  # the blocks that they computed are dropped
        world.compute(request, len(request.labels))
        world.cache.commit(request.lease, len(request.labels))
        world.release(request)
    wait_for(world, deletion)
    assert [world.held(tier) for tier in (DEVICE, HOST, DISK)] == [0, 0, 0]
    assert world.shelf.blocks == {}
    world.serve(LONG)
    assert world.matched(LONG) == [DEVICE] * 4, "a later request is kept again"


def test_copies_in_flight_leave_nothing_of_a_deleted_prompt(make_world: MakeWorld) -> None:
    world = make_world(disk_blocks=30)
    assert world.storage is not None
    world.storage.open_writes.clear()
    request = world.start(LONG)
    world.compute(request, 4)
    world.cache.commit(request.lease, 4)
    world.release(request)
    until(world, lambda: any(t.dst == DISK for t in world.cache._ladder._transfers.transfers))
    deletion = delete(world, LONG)
    assert not world.cache.is_deleted(deletion)
    world.storage.open_writes.set()
    wait_for(world, deletion)
    assert world.shelf.blocks == {}


def test_pins_stay_in_memory_for_their_time_and_end_with_a_deletion(make_world: MakeWorld) -> None:
    world = make_world(host_blocks=20)
    world.serve(LONG)
    world.lose_the_device()
    labels = token_labels(LONG, BLOCK_SIZE)
    number, num = world.cache.pin(NS, labels, 100.0)
    assert (number, num) == (1, 4)
    world.cache.clear(HOST)
    assert world.matched(LONG) == [HOST] * 4
    world.clock.now += 101.0
    world.cache.poll()
    assert world.cache.pins.num_blocks == 0
    world.cache.pin(NS, labels, 100.0)
    wait_for(world, delete(world, LONG))
    assert world.held(HOST) == 0


def test_pins_have_half_of_host_memory_at_most(make_world: MakeWorld) -> None:
    world = make_world(host_blocks=6)
    world.serve(LONG)
    assert world.cache.pin(NS, token_labels(LONG, BLOCK_SIZE), 100.0) == (1, 3)
    assert world.cache.pin(NS, token_labels(LONG, BLOCK_SIZE), 100.0) == (0, 0)
    assert world.cache.pins.remove(1)
    assert not world.cache.pins.remove(1)
