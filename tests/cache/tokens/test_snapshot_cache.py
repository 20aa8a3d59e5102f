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
from tests.cache.tokens.test_cache_machine import StorageMachine
from tests.cache.tokens.world import NS, A, Content, Request, World, store_slowly, until

SIZE = 2
"""Blocks per snapshot."""
EVERY = 4
"""Blocks between two snapshots of a long prompt."""


def points(lease: Lease) -> list[int]:
    """Return where a request makes snapshots."""
    assert isinstance(lease, SnapshotLease)
    return lease.points


class SnapshotWorld(World):
    """A world whose engine has recurrent layers."""

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
        for slot, right in zip(
            lease.start.slots, self.states(request, lease.start.at), strict=True
        ):
            assert np.array_equal(held[slot], right), "wrong bytes in a snapshot"


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtier.cache.states.cache.SNAPSHOT_TOKENS", 2 * EVERY)
        yield


@pytest.fixture
def make() -> Iterator[Callable[..., SnapshotWorld]]:
    made: list[SnapshotWorld] = []

    def make_world(**given: Any) -> SnapshotWorld:
        given = {"device_blocks": 40, "host_blocks": 60, "disk_blocks": 90} | given
        made.append(SnapshotWorld(**given))
        return made[-1]

    yield make_world
    for world in made:
        world.close()


Make = Callable[..., SnapshotWorld]
LONG = [*A, *[4] * 16, 9]
"""Twelve blocks, and a token left to compute."""


def hits(request: Request) -> dict[str, int]:
    return request.lease.record.hit_blocks


def test_a_prompt_is_reused_up_to_its_last_snapshot_from_every_tier(make: Make) -> None:
    shelf = StoredBlocks()
    world = make(shelf=shelf)
    assert points(world.ask(LONG).lease) == [4, 8, 12]
    world.release(world.requests[0])
    world.serve(LONG)
    assert hits(world.serve(LONG)) == {DEVICE: 12}
    world.lose_the_device()
    assert hits(world.serve(LONG)) == {HOST: 12}
    until(world, lambda: len(shelf.blocks) == 12 + 3 * SIZE)
    world = make(shelf=shelf.copy())
    request = world.start(LONG)
    assert hits(request) == {DISK: 12}
    assert request.lease.record.load_bytes == (12 + SIZE) * world.cache.group.bytes_per_block
    assert points(request.lease) == []
    world.finish(request)


def test_a_prompt_is_stored_up_to_its_last_stored_snapshot(make: Make) -> None:
    world = make()
    assert world.storage is not None
    request = store_slowly(world, LONG)
    assert world.storage.num_written == 12 + 3 * SIZE
    last = world.cache._index.extend(NS, world.cache._path(request.labels, 12))[-1]
    world.storage.spoiled.add(world.cache._index.key(last))
    world.lose_the_device()
    world.cache.clear(HOST)
    assert world.fetch(LONG) is not None
    assert world.cache.drain()
    assert world.cache.stored(NS, request.labels) == (8, False)


def test_where_prompts_part_the_second_one_makes_a_snapshot(make: Make) -> None:
    world = make()
    world.serve(LONG)
    others = [[*A, 4, 4, *[number] * 9] for number in (5, 6)]
    second = world.start(others[0])
    assert second.lease.num_shared == 4  # a regular snapshot, although five blocks are known
    assert points(second.lease) == [5, 9]
    world.finish(second)
    third = world.start(others[1])
    assert third.lease.num_shared == 5
    world.finish(third)


def test_a_prompt_of_whole_blocks_can_be_repeated(make: Make) -> None:
    world = make()
    world.serve(A)
    assert world.start(A).lease.num_shared == 3


def test_only_as_many_snapshots_are_made_as_there_is_room_for(make: Make) -> None:
    world = make(device_blocks=13 + SIZE)
    assert points(world.start(LONG).lease) == [12]
    world.release(world.requests[0])
    world = make(device_blocks=13)
    world.serve(LONG)
    assert world.start(LONG).lease.num_shared == 0


def test_a_deleted_prompt_leaves_no_snapshot(make: Make) -> None:
    shelf = StoredBlocks()
    before = make(shelf=shelf)
    before.serve(LONG)
    until(before, lambda: len(shelf.blocks) == 12 + 3 * SIZE)
    labels = before.start(LONG)
    before.release(labels)
    for world in (before, make(shelf=shelf.copy())):
        deletion = world.cache.delete(labels.namespace, labels.labels)
        until(world, lambda: world.cache.is_deleted(deletion))  # noqa: B023
        assert not world.shelf.blocks
        assert [world.held(tier) for tier in (DEVICE, HOST, DISK)] == [0, 0, 0]


def test_a_load_of_a_snapshot_that_fails_or_is_late_breaks_the_lease(make: Make) -> None:
    shelf = StoredBlocks()
    make(shelf=shelf).serve(LONG)
    world = make(shelf=shelf.copy())
    found = world.ask(LONG)
    assert world.cache.drain()
    path = world.cache._path(found.labels, 12)
    key = world.cache._index.key(world.cache._index.extend(found.namespace, path)[-1])
    world.release(found)
    world = make(shelf=shelf.copy())
    world.storage.spoiled.add(key)
    request = world.ask(LONG)
    assert world.cache.drain()
    assert request.lease.broken
    world.release(request)
    again = world.start(LONG)
    assert again.lease.num_shared == 8  # at the snapshot before
    world.finish(again)


class SnapshotMachine(StorageMachine):
    """Random requests, faults, evictions and restarts over prompts with snapshots."""

    make_world = SnapshotWorld
    disk_blocks = 20
    has_lost = True  # a prompt may have too few slots for a snapshot

    def _num_could_be_had(self) -> int:
        return 0  # snapshots take slots, too


def test_random_requests() -> None:
    few = settings(stateful_step_count=40, max_examples=settings.default.max_examples // 2)
    run_state_machine_as_test(SnapshotMachine, settings=few)
