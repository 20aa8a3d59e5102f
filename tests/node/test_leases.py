"""Leases of an engine, in the node and in its client: counted right, whatever is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.devices.cpu import CpuDevice
from kvtier.index.slot_leases import PythonSlotLeases
from kvtier.keyed.cache import BlockLocation
from kvtier.node.cache import NodeCache
from kvtier.node.client import NodeClient
from kvtier.node.engines import Holdings
from kvtier.node.node import CacheNode
from kvtier.node.protocol import unpack
from kvtier.node.room import RoomKey
from kvtier.node.users import SlotUser
from kvtier.types import HOST
from tests.node.world import BLOCK, PATIENCE_S, SCOPE, LocalNode, config_of, local_node, wait_until

KEYS = [bytes([number]) * 8 for number in range(6)]


@pytest.fixture(scope="module", params=["of the index", "in Python"])
def held(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Holdings]:
    """The leases of one engine in a room with six blocks."""
    node = CacheNode(config_of(tmp_path_factory.mktemp("node")), CpuDevice())
    wait_until(lambda: node.memory.num_free == node.memory.num_segments)
    _, room = node.room(RoomKey("", SCOPE, BLOCK, 8))
    reserved = room.reserve(KEYS)
    assert reserved is not None
    room.commit(reserved.keys, range(6))
    user = SlotUser(1, 5, "engine")
    held = Holdings(room, user)
    if request.param == "in Python":
        held._leases = PythonSlotLeases(
            room._index, HOST, room._rows, held.num_leases, user.mask, user.keeps
        )
    yield held
    node.check_invariants()
    node.close()


ASKED = st.lists(st.integers(0, 5), max_size=9)
SLOTS = st.lists(st.integers(-2, 9) | st.sampled_from([63, 64, 1 << 40, -(1 << 62)]), max_size=12)


@given(steps=st.lists(st.tuples(ASKED, SLOTS), max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_each_lease_is_released_once_whatever_is_named(
    held: Holdings, steps: list[tuple[list[int], list[int]]]
) -> None:
    room, model = held.room, Counter[int]()
    held.end()  # of an example that has failed
    for asked, named in steps:
        found = room.look_up([KEYS[at] for at in asked], has_gaps=False)
        room._last_use[:] = 0
        slots, generations = map(unpack, held.lease(found.ready))
        assert slots.tolist() == list(room._index.slots(found.ready, HOST))
        assert generations.tolist() == room.generations(slots).tolist()
        used = room.tier.segments_of(slots).tolist()
        assert set(np.flatnonzero(room._last_use).tolist()) == set(used)
        model.update(slots.tolist())
        held.release(np.array(named, np.int64))
        model -= Counter(named) & model
        assert np.flatnonzero(room.tier.users == 1 << 5).tolist() == sorted(model)
        assert {at: num for at, num in enumerate(held.num_leases.tolist()) if num} == dict(model)
        blocks = room.ready_blocks(KEYS)
        assert model.keys() <= set(room._index.slots(blocks, HOST))
        assert room._index.num_evictable(HOST) == len(KEYS) - len(model)
    assert held.num_slots == len(model)
    held.end()
    assert held.num_slots == 0
    assert room._index.num_evictable(HOST) == len(KEYS)


# -- the client ------------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    with local_node(tmp_path) as node:
        yield node


@pytest.fixture
def cache(node: LocalNode) -> Iterator[NodeCache]:
    """A client in a room with six blocks."""
    cache = NodeCache(NodeClient(node.config.socket), lambda: SCOPE, BLOCK, PATIENCE_S)
    wait_until(lambda: cache.reserve(KEYS) is not None)
    cache.commit(KEYS, range(6))
    yield cache
    cache.close()


def test_look_up_that_leads_to_no_copy_is_released_by_poll(
    node: LocalNode, cache: NodeCache
) -> None:
    for _ in range(2):
        places, pending = cache.begin_lookup([*KEYS, b"unknown!"])
        assert places == [BlockLocation.MEMORY] * 6 + [BlockLocation.NOWHERE]
        assert not pending
    node.until(lambda: leased(node) == 12)
    cache.poll()
    node.until(lambda: leased(node) == 0)


def test_held_blocks_outlive_poll_and_the_others_do_not(node: LocalNode, cache: NodeCache) -> None:
    asked = list(KEYS)
    cache.begin_lookup(asked)
    asked.clear()  # the caller may do with its list what it likes
    cache.begin_lookup(KEYS[:3])
    slots = cache.hold(KEYS[2:4])
    assert cache.guard(KEYS[2:4]).generations == [1, 1]
    assert cache.locate(KEYS[5]) is BlockLocation.MEMORY
    assert cache.sources(KEYS) == [HOST] * 6
    cache.poll()
    node.until(lambda: leased(node) == 2)
    assert cache.hold(KEYS[2:4]) == slots, "by another copy at the same time"
    cache.poll()
    cache.check_invariants()
    cache.release(KEYS[2:4])
    cache.locate(KEYS[0])  # answered when the node has heard what was said before
    cache.poll()
    node.until(lambda: leased(node) == 2)
    cache.release(KEYS[2:4])
    node.until(lambda: leased(node) == 0)


def leased(node: LocalNode) -> int:
    """Return the number of leases of all engines. Called on the node's thread."""
    engines = node.server.registry.engines.values()
    return sum(int(each.num_leases.sum()) for engine in engines for each in engine.rooms.values())
