"""An engine that reserves slots and does not fill them blocks no other engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvtier.cache.block_cache import BlockState
from kvtier.core.types import Slot
from kvtier.node.client.cache import NodeCache
from kvtier.node.client.channel import NodeClient
from kvtier.node.server.reservations import OVERDUE_S, Reservations
from tests.node.harness import BLOCK, SCOPE, LocalNode, local_node, wait_until

KEYS = [bytes([number]) * 36 for number in range(3)]
NOWHERE, ARRIVING, MEMORY = BlockState.NOWHERE, BlockState.ARRIVING, BlockState.MEMORY


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    with local_node(tmp_path) as made:
        yield made


def _cache(node: LocalNode) -> NodeCache:
    cache = NodeCache(NodeClient(node.config.socket), lambda: SCOPE, BLOCK, deadline_s=5.0)
    wait_until(lambda: cache.reserve([b"open" * 9]) is not None)
    cache.abort([b"open" * 9])
    return cache


def test_nobody_waits_for_an_engine_that_does_not_fill_its_slots(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("reservations", "connection"):
        monkeypatch.setattr(f"kvtier.node.server.{module}.OVERDUE_S", 0.3)
    with closing(_cache(node)) as late, closing(_cache(node)) as other:
        partition = late.reserve(KEYS)
        assert partition is not None
        late.commit(KEYS[:1], [0])
        wait_until(lambda: MEMORY in other.lookup(KEYS).states)
        waiter = other.wait_for_reads(KEYS)
        wait_until(lambda: waiter.is_over)
        wait_until(lambda: other.lookup(KEYS).states == [MEMORY, NOWHERE, NOWHERE])
        assert other.reserve(KEYS[1:]) is None, "two engines fill one block"
        late.commit(KEYS[1:], [1, 2])
        wait_until(lambda: other.lookup(KEYS).states == [MEMORY] * 3)


def test_a_slot_that_is_reserved_again_is_not_overdue() -> None:
    now_s = 0.0
    generations = np.array([1, 1, 1], np.int64)
    is_reserved = np.array([True, True, True])
    reservations = Reservations(generations, lambda: now_s)
    reservations.add(is_reserved, [Slot(0), Slot(2)], generations[[0, 2]].tobytes())
    generations[2] = 3
    assert not reservations.has_overdue()
    now_s = OVERDUE_S
    assert reservations.has_overdue()
    assert reservations.are_overdue(np.arange(3)).tolist() == [True, False, False]
    reservations.end(np.array([0, 1]))
    assert not reservations.has_overdue()


def test_a_reservation_that_was_ended_in_time_is_never_overdue() -> None:
    now_s = 0.0
    generations = np.array([1, 1], np.int64)
    is_reserved = np.array([True, True])
    reservations = Reservations(generations, lambda: now_s)
    reservations.add(is_reserved, [Slot(0), Slot(1)], generations.tobytes())
    is_reserved[:] = False
    reservations.end(np.arange(2))
    now_s = time.monotonic()
    assert not reservations.has_overdue()
