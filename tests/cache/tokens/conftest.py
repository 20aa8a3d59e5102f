"""Harnesss for the tests of the cache. Each is closed and checked at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvtier.core.types import WritePolicy
from tests.cache.tokens.harness import Harness


@pytest.fixture
def make_harness() -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(policy: WritePolicy = WritePolicy.WRITE_THROUGH, **settings: float) -> Harness:
        made.append(Harness(policy, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for harness in made:
        harness.close()


@pytest.fixture
def harness(make_harness: Callable[..., Harness]) -> Harness:
    return make_harness()
