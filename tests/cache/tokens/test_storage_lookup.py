"""Storage with slow look-ups: which requests wait for them, and how long."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvtier.core.keys import token_labels
from kvtier.testing import MemoryStorage
from kvtier.tiers import StorageFacts
from tests.cache.tokens.world import BLOCK_SIZE, NS, A, B, C, World, until

MakeWorld = Callable[..., World]

PATIENCE_S = 0.1
ASKED = StorageFacts(finds_at_once=False)


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """Return a world whose storage has A, B and C from an earlier one."""
    before = make_world(disk_blocks=20)
    for tokens in (A, B, C):
        before.serve(tokens)
    world = make_world(disk_blocks=20, shelf=before.shelf, storage_facts=ASKED)
    assert world.cache.config.lookup_deadline_s == PATIENCE_S
    return world


def storage_of(world: World) -> MemoryStorage:
    assert world.storage is not None
    return world.storage


def is_asking(world: World, tokens: list[int]) -> bool:
    return world.cache.lookup(NS, token_labels(tokens, BLOCK_SIZE))


def ask_until_late(world: World, tokens: list[int]) -> None:
    """A request looks up storage, and continues without the answer after its deadline."""
    storage_of(world).open_finds.clear()
    assert is_asking(world, tokens)
    world.clock.now += PATIENCE_S
    assert not is_asking(world, tokens), "a request waited for longer than it may"


def hear(world: World, tokens: list[int]) -> None:
    """The answer arrives, and the next request finds the blocks."""
    storage_of(world).open_finds.set()
    labels = token_labels(tokens, BLOCK_SIZE)
    until(world, lambda: len(world.cache.match(NS, labels).blocks) == 4)


def test_answer_in_time_is_waited_for(world: World) -> None:
    storage_of(world).open_finds.clear()
    assert is_asking(world, A)
    hear(world, A)
    assert not is_asking(world, A), "there is nothing left to hear"
    assert is_asking(world, B)


def test_late_answer_is_for_the_next_request_and_nobody_waits_meanwhile(world: World) -> None:
    ask_until_late(world, A)
    assert not is_asking(world, C), "others waited for storage that is late"
    hear(world, A)


def test_storage_that_was_slow_is_not_waited_for_until_it_is_fast(world: World) -> None:
    ask_until_late(world, A)
    time.sleep(1.5 * PATIENCE_S)  # the look-up takes that long
    hear(world, A)
    assert not is_asking(world, B)
    hear(world, B)
    assert is_asking(world, C), "storage answers in time again"


def test_storage_that_was_heard_late_is_waited_for(world: World) -> None:
    """It answered at once; only the engine was busy with a long step."""
    ask_until_late(world, A)
    hear(world, A)
    assert is_asking(world, B)


def test_nobody_waits_for_longer_than_computing_takes(world: World) -> None:
    world.cache.observe_prefill(0, len(A), PATIENCE_S / 4)
    storage_of(world).open_finds.clear()
    assert is_asking(world, A)
    world.clock.now += PATIENCE_S / 3
    assert not is_asking(world, A)
    assert is_asking(world, A * 2), "to compute all of that takes longer"
    assert is_asking(world, B), "storage is not late"
    world.clock.now += PATIENCE_S
    assert not is_asking(world, A * 20), "it is now"
    hear(world, A)


def test_storage_that_takes_longer_than_computing_is_asked_and_not_waited_for(
    world: World,
) -> None:
    world.cache.observe_prefill(0, len(A), 1e-9)
    storage_of(world).open_finds.clear()
    assert is_asking(world, A), "nobody knows yet how long it takes"
    hear(world, A)
    storage_of(world).open_finds.clear()
    assert not is_asking(world, B)
    hear(world, B)


def test_storage_is_late_though_nobody_who_asked_waits_any_more(world: World) -> None:
    world.cache.observe_prefill(0, len(A), PATIENCE_S / 4)
    storage_of(world).open_finds.clear()
    assert is_asking(world, A)
    world.clock.now += PATIENCE_S / 2
    assert not is_asking(world, A)
    world.clock.now += PATIENCE_S
    world.cache.poll()
    assert not is_asking(world, B)
    hear(world, A)
