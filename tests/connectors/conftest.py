"""Fixtures of the connectors' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtier.connectors.vllm.shared.request_state import RequestState
from tests.connectors.storage_harness import Harness

RequestState.is_strict = True


@pytest.fixture
def harnesss() -> Iterator[list[Harness]]:
    """List of harnesss that are closed at the end of the test."""
    made: list[Harness] = []
    yield made
    for each in made:
        each.slab.close()


@pytest.fixture
def ascends() -> Iterator[Callable[..., Any]]:
    """Returns a function that makes an ``AscendHarness``; each is checked at the end."""
    from tests.connectors.ascend_harness import AscendHarness  # it needs torch

    made: list[AscendHarness] = []

    def make(*args: Any, **more: Any) -> AscendHarness:
        made.append(AscendHarness(*args, **more))
        return made[-1]

    yield make
    for harness in made:
        harness.close()
