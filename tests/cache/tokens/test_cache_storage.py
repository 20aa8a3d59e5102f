"""A storage tier below the host tier: stored blocks are found again, lost ones are recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvtier.core.keys import token_labels
from kvtier.core.types import DEVICE, DISK, HOST, BlockKey, WritePolicy
from kvtier.devices import Direction
from kvtier.testing import StoredBlocks
from kvtier.tiers import StorageFacts

from .harness import BLOCK_SIZE, NS, A, B, C, Harness, Request, count, until

MakeHarness = Callable[..., Harness]
LONG = [*A, 9]
"""Four blocks that can be reused, and a token left to compute."""


@pytest.fixture
def restarted(make_harness: MakeHarness) -> Harness:
    """Return a harness whose storage has A from an earlier one."""
    shelf = StoredBlocks()
    make_harness(disk_blocks=30, shelf=shelf).serve(LONG)
    assert len(shelf.blocks) == 4
    return make_harness(disk_blocks=30, shelf=shelf.copy())


def keys(harness: Harness, tokens: list[int]) -> list[BlockKey]:
    """Return the keys of blocks that the index knows."""
    match = harness.cache.match(NS, token_labels(tokens, BLOCK_SIZE))
    return [harness.cache._index.key(block) for block in match.blocks]


def hits(request: Request) -> dict[str, int]:
    return request.lease.record.hit_blocks


def test_every_block_goes_down_the_ladder(make_harness: MakeHarness) -> None:
    harness = make_harness(disk_blocks=30)
    harness.serve(LONG)
    assert [harness.held(tier) for tier in (DEVICE, HOST, DISK)] == [4, 4, 4]
    harness.lose_the_device()
    harness.cache.clear(HOST)
    assert harness.matched(LONG) == [DISK] * 4


def test_blocks_come_back_after_a_restart(restarted: Harness) -> None:
    assert restarted.matched(LONG) == [], "nothing is in the index before somebody asks"
    request = restarted.start(LONG)
    assert request.lease.num_shared == 4
    assert hits(request) == {DISK: 4}
    restarted.finish(request)
    assert restarted.storage.num_written == 0, "what storage has is not written again"
    assert restarted.matched(LONG) == [DEVICE] * 4


def test_a_longer_prompt_continues_what_came_back(restarted: Harness) -> None:
    request = restarted.start([*A, 7, 7, 7, 7, 9])
    assert hits(request) == {DISK: 4}
    restarted.finish(request)
    assert restarted.storage.num_written == 2


def test_what_was_found_behind_a_gap_is_known_as_well(make_harness: MakeHarness) -> None:
    """Otherwise such blocks would occupy storage without ever being released."""
    shelf = StoredBlocks()
    make_harness(disk_blocks=30, shelf=shelf).serve(LONG)
    del shelf.blocks[list(shelf.blocks)[1]]
    harness = make_harness(disk_blocks=30, shelf=shelf)
    harness.finish(harness.start(LONG))
    assert harness.storage.num_used == harness.held(DISK) == 4
    assert harness.storage.num_written == 1
    harness.check()


def test_other_namespaces_find_nothing(restarted: Harness) -> None:
    assert restarted.start(LONG).lease.num_shared == 4
    assert restarted.ask(LONG, namespace=b"tenant").lease.num_shared == 0


def test_a_block_that_storage_lost_is_recomputed(restarted: Harness) -> None:
    restarted.storage.open_reads.clear()
    first = restarted.ask(LONG)
    lost = keys(restarted, LONG)[2]
    restarted.storage.spoiled.add(lost)
    restarted.storage.open_reads.set()
    assert restarted.cache.drain()
    assert first.lease.broken
    restarted.release(first)
    restarted.check()
    assert restarted.matched(LONG) == [DEVICE, DEVICE], "what arrived before it is kept"
    restarted.storage.spoiled.clear()
    again = restarted.start(LONG)
    assert again.lease.num_shared == 2
    restarted.finish(again)
    assert restarted.matched(LONG) == [DEVICE] * 4
    assert restarted.held(DISK) == 4


def test_two_requests_share_a_read(restarted: Harness) -> None:
    restarted.storage.open_reads.clear()
    first, second = restarted.ask(LONG), restarted.ask([*A, 5])
    restarted.storage.open_reads.set()
    assert restarted.cache.drain()
    assert first.lease.num_shared == second.lease.num_shared == 4
    assert first.lease.slots[:4] == second.lease.slots[:4]
    restarted.check()


def test_pieces_are_copied_on_while_the_next_is_read(restarted: Harness) -> None:
    """Two blocks per piece: two reads, each followed by its own copy to the device."""
    restarted.device.hold(Direction.LOAD)
    request = restarted.ask(LONG)
    reads = [
        transfer
        for transfer in restarted.cache._ladder._transfers.in_flight.all
        if transfer.src == DISK
    ]
    assert [len(read.blocks) for read in reads] == [2, 2]
    assert reads[0].job.wait(60)
    restarted.cache.poll()
    copies = [
        transfer
        for transfer in restarted.cache._ladder._transfers.in_flight.all
        if transfer.src == HOST
    ]
    assert copies[0].job is not None
    assert not request.lease.ready
    restarted.device.release()
    assert restarted.cache.drain()
    restarted.check_request(request)


def test_a_load_that_comes_too_late_is_given_up(restarted: Harness) -> None:
    restarted.storage.open_reads.clear()
    request = restarted.ask(LONG)
    restarted.clock.now += 1000
    restarted.cache.poll()
    assert request.lease.ready
    assert request.lease.broken
    restarted.release(request)
    again = restarted.ask(LONG, load=False)
    assert again.lease.num_shared == 0
    restarted.storage.open_reads.set()
    assert restarted.cache.drain()
    restarted.finish(again)


def test_a_disk_that_hangs_is_not_waited_for(restarted: Harness) -> None:
    """If a read hangs for longer than the prefill takes, the prompt is recomputed."""
    restarted.cache.observe_prefill(0, 1000, 1e-9)
    restarted.storage.open_reads.clear()
    first = restarted.ask(LONG)
    second = restarted.ask([*A, 8])
    assert first.lease.num_shared == 4, "the first read of all is a measurement"
    assert second.lease.num_shared == 0
    restarted.storage.open_reads.set()
    assert restarted.cache.drain()


def test_what_was_not_worth_waiting_for_is_read_meanwhile(restarted: Harness) -> None:
    """Recomputing is cheaper, so no request waits. One piece is still read for the next request."""
    restarted.cache.observe_prefill(0, 1000, 1e-9)
    restarted.cache._ladder.costs.observe_copy((DISK, HOST), 1, 1.0)
    request = restarted.ask(LONG)
    assert request.lease.num_shared == 0
    assert request.lease.ready
    assert restarted.cache.drain()
    assert restarted.matched(LONG) == [HOST, HOST, DISK, DISK]
    restarted.finish(request)


def test_unclaimed_blocks_make_room_for_new_ones(make_harness: MakeHarness) -> None:
    first, shelf = make_harness(disk_blocks=10), StoredBlocks()
    for prompt in (A, B):
        first.serve([*prompt, 9])
    shelf.blocks.update(first.shelf.blocks)
    harness = make_harness(disk_blocks=10, shelf=shelf)
    assert harness.storage.num_unindexed == 8
    harness.serve([*C, 9])
    assert harness.storage.num_unindexed == 6, "two were free, two had to go"
    assert harness.held(DISK) == 4
    assert len(shelf.blocks) == 10


def test_storage_is_a_hard_bound(make_harness: MakeHarness) -> None:
    harness = make_harness(disk_blocks=6)
    for prompt in (A, B, C, A):
        harness.serve([*prompt, 9])
        assert harness.held(DISK) <= 6
    assert len(harness.shelf.blocks) <= 6


def test_only_what_host_memory_has_room_for_is_loaded(make_harness: MakeHarness) -> None:
    shelf = StoredBlocks()
    earlier = make_harness(disk_blocks=30, shelf=shelf)
    for prompt in (A, B):
        earlier.serve([*prompt, 9])
    harness = make_harness(disk_blocks=30, shelf=shelf, host_blocks=5)
    harness.storage.open_reads.clear()
    first, second = harness.ask(LONG), harness.ask([*B, 9])
    assert [each.lease.num_shared for each in (first, second)] == [4, 1]
    harness.storage.open_reads.set()
    assert harness.cache.drain()
    harness.finish(first)
    harness.finish(second)
    harness.finish(harness.start([*B, 9]))


def test_a_load_that_finds_no_room_after_all_is_given_up(restarted: Harness) -> None:
    """Free slots are an upper bound: blocks held in host memory may have to stay."""
    request = restarted.ask(LONG, load=False)
    room: Any = restarted.cache._tiers[HOST]
    taken = room.allocate(room.num_free)
    blocks = restarted.cache.match(NS, request.labels).blocks
    for leg, _ in restarted.cache._ladder._loads.promote(blocks, DISK):
        request.lease.wait_for(leg)
    room.free(taken)
    restarted.cache.poll()
    assert request.lease.broken
    restarted.release(request)
    restarted.check()
    assert restarted.held(HOST) == 0


def test_a_block_is_written_at_its_nth_use(make_harness: MakeHarness) -> None:
    harness = make_harness(disk_blocks=30, archive_after_uses=2)
    harness.serve(LONG)
    assert harness.held(DISK) == 0
    harness.serve(LONG)
    assert harness.held(DISK) == 4


def test_a_write_that_fails_is_tried_again_with_the_next_use(make_harness: MakeHarness) -> None:
    harness = make_harness(disk_blocks=30)
    harness.serve(LONG)
    refused = set(harness.shelf.blocks)
    other = make_harness(disk_blocks=30)
    other.storage.refused = refused
    other.serve(LONG)
    assert other.held(DISK) == 0
    other.storage.refused = set()
    other.serve(LONG)
    assert other.held(DISK) == 4


@pytest.mark.parametrize("is_shared", [False, True])
def test_write_that_fails_takes_nothing_from_others(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """A failed write may leave a part of the block. It remains; every stored copy is right."""
    shelf, facts = (
        StoredBlocks(),
        StorageFacts(evicts=True, finds_at_once=True, is_shared=is_shared),
    )
    harness = make_harness(disk_blocks=30, shelf=shelf, storage_facts=facts)
    dropped: list[BlockKey] = []
    drop = harness.storage.drop

    def noted(keys: list[BlockKey], for_good: bool = False) -> None:
        dropped.extend(keys)
        drop(keys, for_good)

    monkeypatch.setattr(harness.storage, "drop", noted)
    make_harness(disk_blocks=30, shelf=shelf).serve(LONG)
    put_by_another = dict(shelf.blocks)
    harness.storage.unreachable = True
    harness.serve(LONG)
    mover: Any = harness.cache._ladder._mover
    until(harness, lambda: all(gate.lane.is_idle for gate in mover._gates.values()))
    assert len(dropped) == (0 if is_shared else 4)
    assert len(shelf.blocks) == (4 if is_shared else 0)
    shelf.blocks.update(put_by_another)


@pytest.mark.parametrize("policy", WritePolicy)
def test_every_write_policy_reaches_storage(make_harness: MakeHarness, policy: WritePolicy) -> None:
    harness = make_harness(policy, disk_blocks=40, device_blocks=10)
    for prompt in (A, A, B, B, C, C, A, B):
        harness.serve([*prompt, 9])
    assert harness.held(DISK) >= 4


def test_storage_that_hangs_is_left_open_at_the_end(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hanging thread still uses the storage's files and memory."""
    monkeypatch.setattr("kvtier.cache.ladder.transfers.CLOSE_WAIT_S", 0.01)
    harness = Harness(disk_blocks=30)
    harness.storage.open_writes.clear()
    request = harness.start(LONG)
    harness.compute(request, 4)
    harness.cache.commit(request.lease, 4)
    harness.release(request)
    harness.wait()
    harness.cache.poll()
    harness.cache.close()
    assert not harness.storage.closed
    harness.storage.open_writes.set()
    other = make_harness(disk_blocks=30)
    other.end()
    assert other.storage.closed


def scrubbed(harness: Harness) -> None:
    """Wait for the scrub that ``poll`` has begun, if any."""
    mover: Any = harness.cache._ladder._mover
    for job in mover._scrubs.values():
        assert job.wait(60)
    harness.cache.poll()


def test_idle_storage_is_scrubbed_now_and_then(restarted: Harness) -> None:
    restarted.cache.poll()
    scrubbed(restarted)
    assert len(restarted.storage.scrubs) == 1
    restarted.cache.poll()
    assert len(restarted.storage.scrubs) == 1, "not again at once"
    restarted.clock.now += 10
    restarted.cache.poll()
    scrubbed(restarted)
    assert len(restarted.storage.scrubs) == 2
    assert count(restarted.cache.metrics, "kvtier_scrubbed_bytes_total", tier=DISK) > 0


def test_storage_in_use_is_not_scrubbed(restarted: Harness) -> None:
    restarted.storage.open_reads.clear()
    request = restarted.ask(LONG)
    for _ in range(3):
        restarted.clock.now += 10
        restarted.cache.poll()
    assert restarted.storage.scrubs == []
    restarted.storage.open_reads.set()
    assert restarted.cache.drain()
    restarted.finish(request)


def test_the_first_scrub_tells_the_planner_what_a_read_costs(restarted: Harness) -> None:
    ladder = restarted.cache._ladder
    assert (DISK, HOST) not in ladder.cost_snapshot().seconds_per_byte
    restarted.cache.poll()
    scrubbed(restarted)
    assert (DISK, HOST) in ladder.cost_snapshot().seconds_per_byte


def test_damage_that_a_scrub_finds_is_counted(restarted: Harness) -> None:
    restarted.storage.spoiled.update(restarted.shelf.blocks)
    restarted.cache.poll()
    scrubbed(restarted)
    assert count(restarted.cache.metrics, "kvtier_damaged_blocks_total", tier=DISK) == 4


def test_a_slow_disk_leaves_host_memory_to_others(make_harness: MakeHarness) -> None:
    """Writes that the disk has not accepted hold no host memory, so promotions find free slots."""
    shelf = StoredBlocks()
    make_harness(disk_blocks=90, shelf=shelf).serve(LONG)
    harness = make_harness(disk_blocks=90, shelf=shelf, host_blocks=12)
    harness.storage.open_writes.clear()
    for number in range(20, 26):
        serve_while_writes_hang(harness, [number] * 8)
    assert harness.cache._ladder.num_available(HOST) >= 9, "a quarter is on its way at most"
    request = serve_while_writes_hang(harness, LONG)
    assert hits(request) == {DISK: 4}
    assert not request.lease.broken
    unwritten = count(harness.cache.metrics, "kvtier_unwritten_blocks_total", tier=DISK)
    assert unwritten > 0, "what left memory before its turn is counted"
    harness.storage.open_writes.set()


def serve_while_writes_hang(harness: Harness, tokens: list[int]) -> Request:
    """Serve a request from start to end. Its blocks get as far as host memory."""
    request = harness.ask(tokens)
    until(harness, lambda: request.lease.ready)
    harness.check_request(request)
    harness.compute(request, len(request.labels))
    harness.cache.commit(request.lease, len(request.labels))
    harness.release(request)
    transfers = harness.cache._ladder._transfers.in_flight.all
    until(harness, lambda: all(transfer.dst == DISK for transfer in transfers))
    return request


def test_storage_that_fails_is_left_alone_and_tried_again(restarted: Harness) -> None:
    restarted.storage.unreachable = True
    outcomes = []
    for _ in range(4):
        request = restarted.start(LONG)
        outcomes.append((request.lease.broken, request.lease.num_shared))
        restarted.release(request)
        num_reads = len(restarted.storage.reads)
    assert outcomes[0][0], "the first one finds out"
    assert outcomes[-1] == (False, 0), "nothing is planned that would be refused"
    assert num_reads == 3, "and the storage is not asked"
    restarted.storage.unreachable = False
    restarted.clock.now += 100
    request = restarted.start(LONG)
    assert hits(request) == {DISK: 4}
    restarted.finish(request)
