"""kvtier's own front under vLLM over a node: two engines, one cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.kv_harness import KvHarness, are_equal
from tests.kit.nodes import NodeProcess, running

TEXT = "the quick brown fox jump"
"""Six pages."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with running(tmp_path) as made:
        yield made


@pytest.fixture
def make(node: NodeProcess) -> Iterator[Callable[..., KvHarness]]:
    with ExitStack() as stack:

        def harness(**options: Any) -> KvHarness:
            made = KvHarness(node=node.socket, **options)
            stack.callback(made.close)
            stack.callback(made.half.manager.cache.check_invariants)
            open_room(made)
            return made

        yield harness


def open_room(harness: KvHarness) -> None:
    """Reserve until the node's partition is open; an engine computes meanwhile."""
    cache, until_s = harness.half.manager.cache, time.monotonic() + 20
    while cache.reserve([b"k" * 36]) is None:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    cache.abort([b"k" * 36])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_pages_of_one_engine_come_to_another_byte_for_byte(
    make: Callable[..., KvHarness], num_ranks: int
) -> None:
    one, other = make(num_ranks=num_ranks), make(num_ranks=num_ranks)
    one.fill(range(6), seed=1)
    before = one.bytes_of(range(6))
    first = one.serve("first", TEXT, range(6))
    assert one.half.finish(first, [range(6)]) is False, "nothing is under way any more"
    other.fill(range(24), seed=2)
    other.load("again", TEXT, [9, 20, 3, 14, 7, 11, 12])
    assert other.loaded == {"again"}
    assert are_equal(other.bytes_of([9, 20, 3, 14, 7, 11]), before)
    assert not other.failed


def test_engine_computes_while_its_node_is_dead_and_finds_it_again(
    make: Callable[..., KvHarness], node: NodeProcess
) -> None:
    harness = make()
    harness.fill(range(6), seed=1)
    harness.serve("first", TEXT, range(6))
    node.kill()
    for number in range(4):
        dead = harness.request(f"dead {number}", TEXT + "s")
        until_s = time.monotonic() + 20
        while (num := harness.asks(dead)) is None:  # while it tries to open its room
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert num == 0
    node.start()
    open_room(harness)
    other = TEXT[::-1]  # the node may have taken over the first one
    harness.serve("second", other, range(6))
    before = harness.bytes_of(range(6))
    harness.load("again", other, [9, 20, 3, 14, 7, 11, 12])
    assert are_equal(harness.bytes_of([9, 20, 3, 14, 7, 11]), before)
    assert not harness.failed
