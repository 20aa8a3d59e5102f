"""What is said of a prompt, through the whole cache: a flood of others, and who is still there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvtier.hints import MAX_TTL_S, Hint, Retain
from kvtier.keys import token_labels
from kvtier.types import HOST
from tests.core.world import BLOCK_SIZE, NS, World

TALK, OTHER = [1] * 8, [2] * 8


@pytest.fixture
def world() -> Iterator[World]:
    made = World(device_blocks=10, host_blocks=12)
    yield made
    made.close()


def hint(world: World, tokens: list[int], hint: Hint) -> None:
    world.cache.hint(NS, token_labels(tokens, BLOCK_SIZE), hint)
    world.check()


def wait(world: World, tokens: list[int], is_waiting: bool) -> None:
    world.cache.wait(NS, token_labels(tokens, BLOCK_SIZE), is_waiting)
    world.check()


def test_hints_of_clients_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(device_blocks=10, host_blocks=12)
    config = replace(world.cache.config, client_hints="off")  # type: ignore[arg-type]
    monkeypatch.setattr(world.cache, "config", config)
    for token in (1, 2):
        world.serve([token] * 8)
    hint(world, TALK, Hint(retain=(Retain(100),), back_in_s=60))
    wait(world, OTHER, True)
    flood(world)
    assert world.matched(TALK) == []
    assert world.matched(OTHER) == [HOST] * 4, "what the engine knows counts"
    wait(world, OTHER, False)
    world.close()


def flood(world: World, first: int = 10, num_prompts: int = 10) -> None:
    for token in range(first, first + num_prompts):
        world.serve([token] * 8)
    world.lose_the_device()


@pytest.mark.parametrize(
    ("said", "is_there"),
    [
        (None, False),
        (Hint(back_in_s=60), True),
        (Hint(retain=(Retain(90),)), True),
        (Hint(retain=(Retain(90, ttl_s=0.01),)), False),
        (Hint(retain=(Retain(50),)), False),
    ],
    ids=["nothing", "back", "priority", "short", "usual"],
)
def test_after_a_flood_a_conversation_is_there_if_somebody_said_so(
    world: World, said: Hint | None, is_there: bool
) -> None:
    world.serve(TALK)
    if said is not None:
        hint(world, TALK, said)
    flood(world)
    assert world.matched(TALK) == ([HOST] * 4 if is_there else [])


def test_only_the_tokens_that_were_named_stay(world: World) -> None:
    world.serve(TALK)
    hint(world, TALK, Hint(retain=(Retain(90, last_token=3),)))
    flood(world)
    assert world.matched(TALK) == [HOST] * 2


def test_a_conversation_that_is_late_is_as_any_other(world: World) -> None:
    world.serve(TALK)
    hint(world, TALK, Hint(back_in_s=10))
    world.clock.now += 21
    flood(world)
    assert world.matched(TALK) == []


def test_an_ended_session_leaves_first_but_for_what_others_have(world: World) -> None:
    ended = [7, 7, 7, 7, 1, 1, 1, 1]
    world.serve(OTHER)
    world.serve([7, 7, 7, 7, 2, 2, 2, 2])
    world.serve(ended)
    hint(world, ended, Hint(ended=True))
    world.serve([9] * 8)  # there is room for two of its blocks
    world.lose_the_device()
    assert world.matched(ended) == [HOST] * 2
    assert world.matched(OTHER) == [HOST] * 4
    assert world.matched([7, 7, 7, 7, 2, 2, 2, 2]) == [HOST] * 4


def test_what_waits_is_there_when_its_turn_comes_and_not_for_ever(world: World) -> None:
    world.serve(TALK)
    for _ in range(3):
        wait(world, TALK, True)
    flood(world)
    assert world.matched(TALK) == [HOST] * 4
    for _ in range(2):
        wait(world, TALK, False)
    flood(world, 30)
    assert world.matched(TALK) == [HOST] * 4
    wait(world, TALK, False)
    flood(world, 50)
    assert world.matched(TALK) == []


def test_a_tier_full_of_what_must_not_leave_takes_others_when_that_is_over(world: World) -> None:
    for token in (1, 2, 3):
        world.serve([token] * 8)
        hint(world, [token] * 8, Hint(retain=(Retain(100, ttl_s=MAX_TTL_S),)))
    flood(world)
    assert all(world.matched([token] * 8) == [HOST] * 4 for token in (1, 2, 3))
    world.clock.now += MAX_TTL_S
    flood(world, 30)
    assert world.matched([39] * 8) == [HOST] * 4


def test_many_that_wait_cost_nothing_in_between(world: World) -> None:
    """A step of the engine does not go through those that wait."""
    world.serve(TALK)
    calls = 0
    retain = world.cache._index.retain

    def counted(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        retain(*arguments)  # type: ignore[arg-type]

    world.cache._index.retain = counted  # type: ignore[method-assign]
    for _ in range(500):
        wait(world, TALK, True)
    world.serve(OTHER)
    world.cache.poll()
    assert calls == 500
