"""Prompts are reused at snapshots of the recurrent layers' state, of which there are few."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier.cache.lease import Lease
from kvtier.cache.states import SnapshotCache, SnapshotLease
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.testing import StoredBlocks
from tests.cache.tokens.harness import NS, A, Content, Harness, Request, store_slowly, until
from tests.cache.tokens.states import LONG, check_broken_load, check_deletion, hits, made_of
from tests.cache.tokens.test_cache_machine import StorageMachine

SIZE = 2
"""Blocks per snapshot."""
EVERY = 4
"""Blocks between two snapshots of a long prompt."""


def points(lease: Lease) -> list[int]:
    """Return where a request makes snapshots."""
    assert isinstance(lease, SnapshotLease)
    return lease.points


class SnapshotHarness(Harness):
    """A harness whose engine has recurrent layers."""

    cache: SnapshotCache

    @staticmethod
    def make_cache(*given: Any, **named: Any) -> SnapshotCache:
        return SnapshotCache(*given, **named, blocks_per_snapshot=SIZE)

    @staticmethod
    def num_slots(lease: Lease, num_blocks: int) -> int:
        return num_blocks + SIZE * len(points(lease))

    def compute(self, request: Request, num_blocks: int) -> None:
        super().compute(request, num_blocks)
        for at in points(request.lease):
            if at <= num_blocks:
                for slot, block in zip(
                    request.lease.snapshot_slots(at), self.states(request, at), strict=True
                ):
                    self.block_bytes.write(self.pool.memory, self.pool.layout, slot, block)

    def states(self, request: Request, at: int) -> list[Content]:
        """Return the content of the snapshot after ``at`` blocks."""
        path = self.cache._path(request.labels, at)
        return [
            self.block_bytes.expected(request.namespace, path[: at + 1 + n]) for n in range(SIZE)
        ]

    def check_request(self, request: Request, content: Content | None = None) -> None:
        super().check_request(request, content)
        lease = request.lease
        assert isinstance(lease, SnapshotLease)
        if lease.broken or not lease.ready or lease.start is None:
            return
        held = self.contents()[DEVICE]
        assert lease.decision is not None
        states = self.states(request, lease.decision.plan.num_reused_blocks)
        for slot, right in zip(lease.start.slots, states, strict=True):
            assert np.array_equal(held[slot], right), "wrong bytes in a snapshot"


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtier.cache.states.cache.SNAPSHOT_TOKENS", 2 * EVERY)
        yield


@pytest.fixture
def make() -> Iterator[Callable[..., SnapshotHarness]]:
    yield from made_of(SnapshotHarness, device_blocks=40, host_blocks=60, disk_blocks=90)


Make = Callable[..., SnapshotHarness]


def test_a_prompt_is_reused_up_to_its_last_snapshot_from_every_tier(make: Make) -> None:
    shelf = StoredBlocks()
    harness = make(shelf=shelf)
    assert points(harness.ask(LONG).lease) == [4, 8, 12]
    harness.release(harness.requests[0])
    harness.serve(LONG)
    assert hits(harness.serve(LONG)) == {DEVICE: 12}
    harness.lose_the_device()
    assert hits(harness.serve(LONG)) == {HOST: 12}
    until(harness, lambda: len(shelf.blocks) == 12 + 3 * SIZE)
    harness = make(shelf=shelf.copy())
    request = harness.start(LONG)
    assert hits(request) == {DISK: 12}
    assert request.lease.record.load_bytes == (12 + SIZE) * harness.cache.group.bytes_per_block
    assert points(request.lease) == []
    harness.finish(request)


def test_a_prompt_is_stored_up_to_its_last_stored_snapshot(make: Make) -> None:
    harness = make()
    assert harness.storage is not None
    request = store_slowly(harness, LONG)
    assert harness.storage.num_written == 12 + 3 * SIZE
    last = harness.cache._index.extend(NS, harness.cache._path(request.labels, 12))[-1]
    harness.storage.spoiled.add(harness.cache._index.key(last))
    harness.lose_the_device()
    harness.cache.clear(HOST)
    assert harness.fetch(LONG) is not None
    assert harness.cache.drain()
    assert harness.cache.stored(NS, request.labels) == (8, False)


def test_where_prompts_part_the_second_one_makes_a_snapshot(make: Make) -> None:
    harness = make()
    harness.serve(LONG)
    others = [[*A, 4, 4, *[number] * 9] for number in (5, 6)]
    second = harness.start(others[0])
    assert second.lease.num_shared == 4  # a regular snapshot, although five blocks are known
    assert points(second.lease) == [5, 9]
    harness.finish(second)
    third = harness.start(others[1])
    assert third.lease.num_shared == 5
    harness.finish(third)


def test_a_prompt_of_whole_blocks_can_be_repeated(make: Make) -> None:
    harness = make()
    harness.serve(A)
    assert harness.start(A).lease.num_shared == 3


def test_only_as_many_snapshots_are_made_as_there_is_room_for(make: Make) -> None:
    harness = make(device_blocks=13 + SIZE)
    assert points(harness.start(LONG).lease) == [12]
    harness.release(harness.requests[0])
    harness = make(device_blocks=13)
    harness.serve(LONG)
    assert harness.start(LONG).lease.num_shared == 0


def test_a_deleted_prompt_leaves_no_snapshot(make: Make) -> None:
    check_deletion(make, 12 + 3 * SIZE)


def test_a_load_of_a_snapshot_that_fails_or_is_late_breaks_the_lease(make: Make) -> None:
    shelf = StoredBlocks()
    before = make(shelf=shelf)
    labels = before.serve(LONG).labels
    until(before, lambda: len(shelf.blocks) == 12 + 3 * SIZE)
    path = before.cache._path(labels, 12)
    key = before.cache._index.key(before.cache._index.extend(NS, path)[-1])
    assert check_broken_load(make, shelf, key) == 8, "the snapshot before"


class SnapshotMachine(StorageMachine):
    """Random requests, faults, evictions and restarts over prompts with snapshots."""

    make_harness = SnapshotHarness
    disk_blocks = 20
    has_lost = True  # a prompt may have too few slots for a snapshot

    def _num_could_be_had(self) -> int:
        return 0  # snapshots take slots, too


def test_random_requests() -> None:
    few = settings(stateful_step_count=40, max_examples=settings.default.max_examples // 2)
    run_state_machine_as_test(SnapshotMachine, settings=few)
