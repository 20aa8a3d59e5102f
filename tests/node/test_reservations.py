"""An engine that reserves slots and does not fill them blocks no other engine."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from kvtier.cache.block_cache import BlockState
from kvtier.node.server.reservations import OVERDUE_S, Reservations
from kvtier.node.wire.protocol import pack
from tests.kit.waiting import wait_until
from tests.node.harness import LocalNode, node_cache

KEYS = [bytes([number]) * 36 for number in range(3)]
NOWHERE, ARRIVING, MEMORY = BlockState.NOWHERE, BlockState.ARRIVING, BlockState.MEMORY


def test_nobody_waits_for_an_engine_that_does_not_fill_its_slots(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("reservations", "connection"):
        monkeypatch.setattr(f"kvtier.node.server.{module}.OVERDUE_S", 0.3)
    with (
        closing(node_cache(node.config.socket)) as late,
        closing(node_cache(node.config.socket)) as other,
    ):
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


def test_a_slot_that_is_reserved_again_or_filled_in_time_is_not_overdue() -> None:
    now_s = 0.0
    generations = np.array([1, 1, 1], np.int64)
    is_reserved = np.array([True, True, True])
    reservations = Reservations(generations, lambda: now_s)
    reservations.add(is_reserved, pack([0, 2]), generations[[0, 2]].tobytes())
    generations[2] = 3
    assert not reservations.has_overdue()
    now_s = OVERDUE_S
    assert reservations.has_overdue()
    assert reservations.are_overdue(np.arange(3)).tolist() == [True, False, False]
    reservations.end(np.array([0, 1]))
    assert not reservations.has_overdue()
    reservations.add(is_reserved, pack([0]), generations[[0]].tobytes())
    is_reserved[0] = False  # it is ended in time
    reservations.end(np.array([0]))
    now_s = 2 * OVERDUE_S
    assert not reservations.has_overdue()


def test_only_a_reservation_that_was_filled_as_a_whole_is_forgotten() -> None:
    now_s = 0.0
    generations = np.array([1, 1, 1, 1], np.int64)
    is_reserved = np.full(4, True)
    reservations = Reservations(generations, lambda: now_s)
    for slots in ([0, 1], [2, 3]):
        reservations.add(is_reserved, pack(slots), generations[slots].tobytes())
    for slots in ([0], [2, 3]):
        is_reserved[slots] = False
        reservations.end_whole(pack(slots), generations[slots].tobytes())
    is_reserved[2] = True  # by another reservation, which is not late
    now_s = OVERDUE_S
    assert reservations.has_overdue()
    assert reservations.are_overdue(np.arange(4)).tolist() == [False, True, False, False]
    reservations.end_whole(pack([1]), generations[[1]].tobytes())
    assert not reservations.has_overdue()
