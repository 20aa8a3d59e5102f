"""Fixtures of the connectors' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtier.connectors.vllm.shared.request_state import RequestState
from tests.connectors.storage_world import World

RequestState.is_strict = True


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    """List of worlds that are closed at the end of the test."""
    made: list[World] = []
    yield made
    for each in made:
        each.slab.close()


@pytest.fixture
def ascends() -> Iterator[Callable[..., Any]]:
    """Returns a function that makes an ``AscendWorld``; each is checked at the end."""
    from tests.connectors.ascend_world import AscendWorld  # it needs torch

    made: list[AscendWorld] = []

    def make(*args: Any, **more: Any) -> AscendWorld:
        made.append(AscendWorld(*args, **more))
        return made[-1]

    yield make
    for world in made:
        world.close()
