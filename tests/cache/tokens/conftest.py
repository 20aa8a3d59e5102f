"""Worlds for the tests of the cache. Each is closed and checked at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvtier.core.types import WritePolicy
from tests.cache.tokens.world import World


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(policy: WritePolicy = WritePolicy.WRITE_THROUGH, **settings: float) -> World:
        made.append(World(policy, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()
