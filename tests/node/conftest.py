"""Fixtures of the tests of the node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.harness import LocalNode, local_node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    with local_node(tmp_path) as made:
        yield made
