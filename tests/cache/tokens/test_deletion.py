"""Deletion of prompts through the whole cache: no tier returns them, even after a restart."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.cache.deletion import Deletion
from kvtier.core.keys import token_labels
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.testing import StoredBlocks

from .harness import BLOCK_SIZE, NS, A, B, Harness, until

MakeHarness = Callable[..., Harness]
LONG, OTHER = [*A, 9], [*B, 9]
"""Four blocks each."""
TENANT = b"another tenant"


def delete(harness: Harness, tokens: list[int], namespace: bytes = NS) -> Deletion:
    done = harness.cache.delete(namespace, token_labels(tokens, BLOCK_SIZE))
    harness.check()
    return done


def wait_for(harness: Harness, deletion: Deletion) -> None:
    until(harness, lambda: harness.cache.is_deleted(deletion))
    harness.check()


def located(harness: Harness, tokens: list[int]) -> list[str]:
    return harness.cache.locate(NS, token_labels(tokens, BLOCK_SIZE))


def test_a_deleted_prompt_is_in_no_tier_and_no_other_prompt_is_missing(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(disk_blocks=30)
    harness.serve(LONG)
    harness.serve(OTHER)
    assert located(harness, LONG) == ["memory"] * 4
    wait_for(harness, delete(harness, LONG))
    assert located(harness, LONG) == ["nowhere"] * 4
    assert harness.matched(LONG) == []
    assert harness.matched(OTHER) == [DEVICE] * 4
    assert [harness.held(tier) for tier in (DEVICE, HOST, DISK)] == [4, 4, 4]
    assert len(harness.shelf.blocks) == 4
    assert harness.start(LONG).lease.num_shared == 0


def test_what_an_earlier_process_left_is_deleted_by_prompt_and_all(
    make_harness: MakeHarness,
) -> None:
    shelf = StoredBlocks()
    before = make_harness(disk_blocks=30, shelf=shelf)
    before.serve(LONG)
    before.serve(OTHER)
    harness = make_harness(disk_blocks=30, shelf=shelf.copy())
    wait_for(harness, delete(harness, LONG))
    assert len(harness.shelf.blocks) == 4
    request = harness.start(OTHER)
    assert request.lease.num_shared == 4
    harness.finish(request)
    wait_for(harness, harness.cache.delete_all(lambda _: True))
    assert harness.shelf.blocks == {}
    assert harness.matched(OTHER) == []


def test_a_namespace_is_deleted_and_others_stay(make_harness: MakeHarness) -> None:
    harness = make_harness(disk_blocks=30)
    harness.serve(LONG)
    harness.serve(LONG, namespace=TENANT)
    used = harness.cache.used_by_namespace()
    assert used.keys() == {NS, TENANT}
    assert used[TENANT] == used[NS]
    assert used[NS][HOST] == 4 * harness.cache.group.bytes_per_block
    wait_for(harness, harness.cache.delete_all(lambda namespace: namespace == TENANT))
    assert harness.matched(LONG, TENANT) == []
    assert harness.matched(LONG) == [DEVICE] * 4
    assert len(harness.shelf.blocks) == 4


def test_blocks_in_use_are_not_found_and_go_when_their_request_ends(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(disk_blocks=30)
    harness.serve(LONG)
    running = harness.start(LONG)
    deletion = delete(harness, LONG)
    assert harness.cache.drain()
    assert not harness.cache.is_deleted(deletion)
    assert harness.matched(LONG) == []
    late = harness.start(LONG)
    assert late.lease.num_shared == 0
    for request in (late, running):  # the blocks that they computed are dropped
        harness.compute(request, len(request.labels))
        harness.cache.commit(request.lease, len(request.labels))
        harness.release(request)
    wait_for(harness, deletion)
    assert [harness.held(tier) for tier in (DEVICE, HOST, DISK)] == [0, 0, 0]
    assert harness.shelf.blocks == {}
    harness.serve(LONG)
    assert harness.matched(LONG) == [DEVICE] * 4, "a later request is kept again"


def test_copies_in_flight_leave_nothing_of_a_deleted_prompt(make_harness: MakeHarness) -> None:
    harness = make_harness(disk_blocks=30)
    assert harness.storage is not None
    harness.storage.open_writes.clear()
    request = harness.start(LONG)
    harness.compute(request, 4)
    harness.cache.commit(request.lease, 4)
    harness.release(request)
    in_flight = harness.cache._ladder._transfers.in_flight
    until(harness, lambda: any(transfer.dst == DISK for transfer in in_flight.all))
    deletion = delete(harness, LONG)
    assert not harness.cache.is_deleted(deletion)
    harness.storage.open_writes.set()
    wait_for(harness, deletion)
    assert harness.shelf.blocks == {}


def test_pins_stay_in_memory_for_their_time_and_end_with_a_deletion(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(host_blocks=20)
    harness.serve(LONG)
    harness.lose_the_device()
    labels = token_labels(LONG, BLOCK_SIZE)
    number, num = harness.cache.pin(NS, labels, 100.0)
    assert (number, num) == (1, 4)
    harness.cache.clear(HOST)
    assert harness.matched(LONG) == [HOST] * 4
    harness.clock.now += 101.0
    harness.cache.poll()
    assert harness.cache.pins.num_blocks == 0
    harness.cache.pin(NS, labels, 100.0)
    wait_for(harness, delete(harness, LONG))
    assert harness.held(HOST) == 0


def test_pins_have_half_of_host_memory_at_most(make_harness: MakeHarness) -> None:
    harness = make_harness(host_blocks=6)
    harness.serve(LONG)
    assert harness.cache.pin(NS, token_labels(LONG, BLOCK_SIZE), 100.0) == (1, 3)
    assert harness.cache.pin(NS, token_labels(LONG, BLOCK_SIZE), 100.0) == (0, 0)
    assert harness.cache.pins.remove(1)
    assert not harness.cache.pins.remove(1)
