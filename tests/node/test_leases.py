"""Leases of an engine, in the node and in its client: counts stay right for any requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.cache.block_cache import BlockState
from kvtier.core.types import HOST, BlockId
from kvtier.devices.cpu import CpuDevice
from kvtier.index.slot_leases import PythonSlotLeases
from kvtier.node.client.cache import NodeCache
from kvtier.node.client.channel import NodeClient
from kvtier.node.server.connection import _look_up
from kvtier.node.server.engines import Holdings
from kvtier.node.server.node import CacheNode
from kvtier.node.server.partition_key import PartitionKey
from kvtier.node.server.users import SlotUser
from kvtier.node.wire.protocol import (
    CommitNotice,
    FromEngine,
    LookupAnswer,
    LookupRequest,
    ReleaseNotice,
    decode_engine,
    decode_node,
    pack,
    unpack,
)
from kvtier.node.wire.protocol import frame as frame_of
from tests.kit.waiting import wait_until
from tests.node.harness import BLOCK, PATIENCE_S, SCOPE, LocalNode, config_of, opened

KEYS = [bytes([number]) * 8 for number in range(6)]


@pytest.fixture(scope="module", params=["of the index", "in Python"])
def held(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Holdings]:
    """The leases of one engine in a partition with six blocks."""
    node = CacheNode(config_of(tmp_path_factory.mktemp("node")), CpuDevice())
    wait_until(lambda: node.memory.num_free == node.memory.num_segments)
    _, partition = opened(node, PartitionKey("", SCOPE, BLOCK, 8))
    reserved = partition.reserve(KEYS)
    assert reserved is not None
    partition.cache.commit(reserved.keys, range(6))
    user = SlotUser(1, 5, "engine")
    held = Holdings(partition, user)
    if request.param == "in Python":
        held._leases = PythonSlotLeases(
            partition._index,
            HOST,
            partition.slot_arrays,
            held.num_leases,
            held.is_reserved,
            user.mask,
            user.keeps,
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
    partition, model = held.partition, Counter[int]()
    list(held.end())  # of an example that has failed
    for asked, named in steps:
        found = partition.locate([KEYS[at] for at in asked])
        partition.last_use[:] = 0
        slots, generations = map(unpack, held.lease(found.ready))
        assert slots.tolist() == list(partition._index.slots(found.ready, HOST))
        assert generations.tolist() == partition.tier.generations[slots].tolist()
        used = partition.tier.segments_of(slots).tolist()
        assert set(np.flatnonzero(partition.last_use).tolist()) == set(used)
        model.update(slots.tolist())
        held.release(np.array(named, np.int64))
        model -= Counter(named) & model
        assert np.flatnonzero(partition.tier.users == 1 << 5).tolist() == sorted(model)
        assert {at: num for at, num in enumerate(held.num_leases.tolist()) if num} == dict(model)
        blocks = partition.locate(KEYS).ready
        assert model.keys() <= set(partition._index.slots(blocks, HOST))
        assert partition._index.num_evictable(HOST) == len(KEYS) - len(model)
    assert held.num_slots == len(model)
    list(held.end())
    assert held.num_slots == 0
    assert partition._index.num_evictable(HOST) == len(KEYS)


@given(steps=st.lists(SLOTS, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_each_reserved_slot_ends_once_whatever_is_named(
    held: Holdings, steps: list[list[int]]
) -> None:
    partition = held.partition
    list(held.end())
    found = held.reserve([bytes([200 + number]) * 8 for number in range(3)])
    assert found is not None
    reserved, generations = found
    model = list(reserved.slots)
    assert unpack(generations).tolist() == partition.tier.generations[list(reserved.slots)].tolist()
    for named in steps:
        assert np.flatnonzero(partition.tier.users == 1 << 5).tolist() == sorted(model)
        assert np.flatnonzero(held.is_reserved).tolist() == sorted(model)
        assert held.num_slots == len(model)
        slots = np.array(named, np.int64)
        before = [slot for slot in dict.fromkeys(named) if slot in model]
        blocks = partition.cache.slots.blocks_in(np.array(before, np.int64))
        which, ended = held._leases.end_reserved(slots)
        assert list(which) == [named.index(slot) for slot in before]
        assert list(ended) == list(blocks)
        held.num_reserved -= len(which)
        model = [slot for slot in model if slot not in before]
        partition.cache.abort_blocks(ended)
    list(held.end())
    partition.check_invariants()
    assert not partition.tier.users.any()


@given(
    asked=st.lists(st.sampled_from([*KEYS, b"unknown!"]), max_size=9),
    numbers=st.tuples(st.integers(0, 1 << 63), st.sampled_from([0, 1, 255, 1 << 40])),
    flags=st.tuples(st.booleans(), st.booleans()),
    is_alone=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_simple_messages_are_answered_as_all_are(
    held: Holdings,
    asked: list[bytes],
    numbers: tuple[int, int],
    flags: tuple[bool, bool],
    is_alone: bool,
) -> None:
    if isinstance(held._leases, PythonSlotLeases):
        content = memoryview(b"")
        assert held._leases.serve(content, 0, 8, True, 0.0) is None
        assert held._leases.serve_reserve(content, 0, 8, (), no_room, 0, False, 0.0) is None
        assert held._leases.serve_commit(content, 0) is None
        return
    partition, key_bytes = held.partition, held.partition.key.key_bytes
    list(held.end())
    number, at = numbers
    request = LookupRequest(number, at, b"".join(asked), *flags)
    served = held._leases.serve(content_of(request), at, key_bytes, is_alone, 0.0)
    if not asked or (b"unknown!" in asked and not is_alone):
        assert served is None
        assert held.num_slots == 0
        assert partition._index.num_evictable(HOST) == len(KEYS)
        return
    assert served is not None
    frame, looked_up, ended = served
    assert list(ended) == []
    num_leases = held.num_leases.copy()
    expected, _ = _look_up(request, held)
    answer = decode_node(frame[4:])
    assert isinstance(answer, LookupAnswer)
    assert answer == expected
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    assert looked_up == (expected.places if request.counts else b"")
    assert held.num_leases.tolist() == (2 * num_leases).tolist()
    again = content_of(ReleaseNotice(at, 2 * expected.slots + pack([-1, 1 << 40])))
    released = held._leases.serve(again, at, key_bytes, is_alone, 0.0)
    assert released is not None
    assert released[:2] == (b"", b"")
    assert list(released[2]) == 2 * list(
        partition.locate([key for key in asked if key in KEYS]).ready
    )
    assert held.num_slots == 0
    assert partition._index.num_evictable(HOST) == len(KEYS)


@given(content=st.binary(max_size=40), cut=st.integers(0, 60), at=st.integers(0, 60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_damaged_messages_are_not_served_simply(
    held: Holdings, content: bytes, cut: int, at: int
) -> None:
    """The fast path leaves damaged messages to the decoder, which refuses them."""
    list(held.end())
    for message in (
        LookupRequest(300, 7, KEYS[0] + KEYS[1]),
        ReleaseNotice(7, pack([1, 2])),
        CommitNotice(7, b"", b""),
    ):
        whole = bytes(content_of(message))
        other = whole[:at] + content + whole[at + len(content) :]
        for damaged in (whole[: cut % len(whole)], whole + b"x", other, content):
            served = held._leases.serve(memoryview(damaged), 7, 8, True, 0.0)
            if served is not None:
                assert type(decode_engine(damaged)) in (LookupRequest, ReleaseNotice)
            reserved = held._leases.serve_reserve(
                memoryview(damaged), 7, 8, (), no_room, 0, False, 0.0
            )
            assert reserved is None
            if held._leases.serve_commit(memoryview(damaged), 7) is not None:
                assert isinstance(decode_engine(damaged), CommitNotice)
        assert held._leases.serve(memoryview(whole), 8, 8, True, 0.0) is None
    list(held.end())


def no_room(num_new: int, ready: Sequence[BlockId]) -> None:
    """Make no room."""


def content_of(message: FromEngine) -> memoryview:
    """Return a message as a connection receives it."""
    return memoryview(frame_of(message))[4:]


# -- the client ------------------------------------------------------------------------------------


@pytest.fixture
def cache(node: LocalNode) -> Iterator[NodeCache]:
    """A client in a partition with six blocks of another one."""
    writer, cache = (
        NodeCache(NodeClient(node.config.socket), lambda: SCOPE, BLOCK, PATIENCE_S)
        for _ in range(2)
    )
    wait_until(lambda: writer.reserve(KEYS) is not None)
    writer.commit(KEYS, range(6))
    # An answer: all earlier messages were processed.
    wait_until(lambda: writer.lookup([b"unknown!"]).states == [BlockState.NOWHERE])
    wait_until(lambda: cache.lookup([b"unknown!"]).states == [BlockState.NOWHERE])
    yield cache
    writer.close()
    cache.close()


def test_blocks_that_the_node_has_found_are_leased_until_poll_and_seen_ones_are_not(
    node: LocalNode, cache: NodeCache
) -> None:
    for _ in range(3):
        places, pending = cache.lookup([*KEYS, b"unknown!"])
        assert places == [BlockState.MEMORY] * 6 + [BlockState.NOWHERE]
        assert not pending
    node.until(lambda: leased(node) == 2 * 6)
    cache.poll()
    node.until(lambda: leased(node) == 0)


def test_held_blocks_outlive_poll_and_the_others_do_not(node: LocalNode, cache: NodeCache) -> None:
    asked = list(KEYS)
    cache.lookup(asked)
    asked.clear()  # the caller may do with its list what it likes
    cache.lookup(KEYS[:3])
    held = cache.hold(KEYS[2:4])
    assert held.guard is not None
    assert held.guard.generations == [1, 1]
    assert cache.lookup_again(KEYS[5]) is BlockState.MEMORY
    assert cache.sources(KEYS) == [HOST] * 6
    cache.poll()
    node.until(lambda: leased(node) == 2)
    assert cache.hold(KEYS[2:4]).slots == held.slots, "by another copy at the same time"
    cache.poll()
    cache.check_invariants()
    cache.release(KEYS[2:4])
    cache.lookup([b"unknown!"])  # answered after the node has processed all earlier messages
    cache.poll()
    node.until(lambda: leased(node) == 2)
    cache.release(KEYS[2:4])
    node.until(lambda: leased(node) == 0)


def leased(node: LocalNode) -> int:
    """Return the number of leases of all engines. Called on the node's thread."""
    engines = node.server.registry.engines.values()
    return sum(
        int(partition.num_leases.sum())
        for engine in engines
        for partition in engine.partitions.values()
    )
