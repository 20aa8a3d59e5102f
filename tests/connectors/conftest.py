"""Fixtures of the connectors' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.connectors.slab_world import World


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    """Closed at the end, whatever happened."""
    made: list[World] = []
    yield made
    for each in made:
        each.slab.close()
