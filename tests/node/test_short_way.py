"""Messages that one native call serves have the effects that they have without it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.hot import NATIVE
from kvtier.node.server.connection import Connection
from kvtier.node.server.engines import AttachedEngine, Holdings
from kvtier.node.server.reservations import OVERDUE_S
from kvtier.node.wire import protocol
from tests.node.harness import Bare, LocalNode, bare, local_node

BLOCK = 4 << 10
KEY = b"one key."
NUM_KEYS = 400
SIZES = {"host_capacity": "512KiB", "segment_capacity": "64KiB"}


@contextmanager
def two_nodes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Iterator[list[LocalNode]]:
    """Yield a node, and one that decodes every message. They have 128 slots in 8 segments."""
    serve = Holdings.serve

    def serve_some(self: Holdings, content: memoryview, number: int) -> Any:
        is_second = self.partition in nodes[1].node.partitions
        return None if is_second else serve(self, content, number)

    monkeypatch.setattr(Holdings, "serve", serve_some)
    for name in "short", "long":
        (folder / name).mkdir()
    with (
        local_node(folder / "short", **SIZES, **options) as short,
        local_node(folder / "long", **SIZES, **options) as long,
    ):
        nodes = [short, long]
        yield nodes


def slots_in_use(node: LocalNode) -> list[int]:
    """Return numbers that must be the same in both nodes, whichever slots they give out."""
    [partition] = node.node.partitions
    [engine] = node.server.registry.engines.values()
    [held] = engine.partitions.values()
    tier = partition.tier
    return [
        tier.num_free,
        tier.num_used,
        tier.num_segments,
        held.num_reserved,
        int(held.is_reserved.sum()),
        int(partition.cache.are_reserved.sum()),
        int((tier.users != 0).sum()),
        int((tier.generations % 2).sum()),
        partition._ladder.sample_mask,
        len(partition._ladder._reuse_sampler._marks),
    ]


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "runs"])
@pytest.mark.parametrize("seed", range(3))
def test_short_way_and_long_way_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, seed: int
) -> None:
    rng = random.Random(seed)
    served: list[bool] = []
    simply = Connection._serve_simply

    def note(self: Connection, content: memoryview) -> bool:
        is_served = simply(self, content)
        if bytes(content[2:5]) in (b"Res", b"Com"):
            served.append(is_served)
        return is_served

    monkeypatch.setattr(Connection, "_serve_simply", note)
    with two_nodes(tmp_path, monkeypatch, eviction_policy=policy) as nodes:
        ends = [Bare(node.config.socket) for node in nodes]
        with closing(ends[0].socket), closing(ends[1].socket):
            for end in ends:
                end.attach()
            numbers = [end.open(BLOCK).partition for end in ends]
            reserved: list[list[tuple[bytes, list[int]]]] = []  # per step: key, slots in both
            for step in range(120):
                _step(rng, step, nodes, ends, numbers, reserved)
                found = [node.do(partial(slots_in_use, node)) for node in nodes]
                assert found[0] == found[1]
    assert sum(served) > (60 if NATIVE else -1), "the short way was not taken"


def _step(
    rng: random.Random,
    step: int,
    nodes: list[LocalNode],
    ends: list[Bare],
    numbers: list[int],
    reserved: list[list[tuple[bytes, list[int]]]],
) -> None:
    first = rng.randrange(NUM_KEYS)
    keys = [number.to_bytes(8, "big") for number in range(first, first + rng.randrange(1, 40))]
    if rng.random() < 0.2:
        keys += keys[:3]
    kind = rng.random()
    if kind < 0.5 or not reserved:
        messages = [protocol.ReserveRequest(step + 10, at, b"".join(keys)) for at in numbers]
        answers = [end.ask(message) for end, message in zip(ends, messages, strict=True)]
        assert answers[0].new == answers[1].new
        assert answers[0].known == answers[1].known
        slots = [protocol.unpack(answer.slots).tolist() for answer in answers]
        new = [key for key, is_new in zip(keys, answers[0].new, strict=True) if is_new]
        assert len(set(slots[0])) == len(slots[0]) == len(new)
        for node, answer, its in zip(nodes, answers, slots, strict=True):
            [partition] = node.node.partitions
            expected = partition.tier.generations[its].tolist()
            assert protocol.unpack(answer.generations).tolist() == expected
        if new:
            reserved.append(list(zip(new, map(list, zip(*slots, strict=True)), strict=True)))
    elif kind < 0.9:
        some = reserved.pop(rng.randrange(len(reserved)))
        named = some + some[:2] if rng.random() < 0.2 else some
        is_kept = rng.random() < 0.85
        for at, (end, number) in enumerate(zip(ends, numbers, strict=True)):
            its = protocol.pack([slots[at] for _, slots in named])
            depths = protocol.pack(range(len(named)))
            end.send(
                protocol.CommitNotice(number, its, depths)
                if is_kept
                else protocol.AbortNotice(number, its)
            )
    lookups = [protocol.LookupRequest(step + 5000, at, b"".join(keys), True) for at in numbers]
    found = [end.ask(message) for end, message in zip(ends, lookups, strict=True)]
    assert found[0].places == found[1].places
    assert len(found[0].slots) == len(found[1].slots)
    for end, number, answer in zip(ends, numbers, found, strict=True):
        end.send(protocol.ReleaseNotice(number, answer.slots))
        end.ask(protocol.LookupRequest(step + 9000, number, keys[0]))
        end.send(protocol.ReleaseNotice(number, answer.slots[:0]))


@pytest.mark.skipif(not NATIVE, reason="there is only the long way")
def test_an_overdue_block_is_not_known(tmp_path: Path) -> None:
    """An engine does not wait for a block that another one is late to store."""
    with local_node(tmp_path, **SIZES) as node:
        late, other = Bare(node.config.socket), Bare(node.config.socket)
        with closing(late.socket), closing(other.socket):
            numbers = late.enter("late"), other.enter("other")
            keys = [bytes([number]) * 8 for number in range(4)]
            late.ask(protocol.LookupRequest(4, numbers[0], keys[0]))  # the first takes the long way
            late.ask(protocol.ReserveRequest(5, numbers[0], b"".join(keys[:2])))
            before = other.ask(protocol.ReserveRequest(5, numbers[1], b"".join(keys[:3])))
            assert (before.new, before.known) == (b"\0\0\1", b"\1\1\0")
            [partition] = node.node.partitions
            node.do(lambda: _advance(partition.reservations, 2 * OVERDUE_S))
            after = other.ask(protocol.ReserveRequest(6, numbers[1], b"".join(keys)))
            assert (after.new, after.known) == (b"\0\0\0\1", b"\0\0\0\0")


def test_a_request_that_waits_for_a_block_hears_of_its_commit(node: LocalNode) -> None:
    with bare(node.config.socket) as writer, bare(node.config.socket) as other:
        numbers = writer.enter("writer"), other.enter("other")
        writer.ask(protocol.LookupRequest(4, numbers[0], KEY))
        answer = writer.ask(protocol.ReserveRequest(5, numbers[0], KEY))
        other.send(protocol.WatchNotice(numbers[1], 77, KEY))
        other.ask(protocol.LookupRequest(6, numbers[1], KEY))  # after the notice was handled
        writer.send(protocol.CommitNotice(numbers[0], answer.slots, protocol.pack([0])))
        ended = other.receive()
        assert isinstance(ended, protocol.EndedNotice)
        assert ended.watch == 77
        assert ended.seconds < OVERDUE_S


def test_a_reservation_that_is_never_read_is_given_up(node: LocalNode) -> None:
    """The process lives on, so its other slots stay in use."""
    with bare(node.config.socket) as engine:
        number = engine.enter()
        engine.ask(protocol.LookupRequest(4, number, KEY))
        with node.held_up():
            engine.send(protocol.ReserveRequest(5, number, KEY))
            engine.socket.close()
    [partition] = node.node.partitions
    node.until(lambda: engine_of(node).clients["#1"].connections == {})
    assert partition.tier.num_used == 0
    assert node.num_used == 0


def engine_of(node: LocalNode) -> AttachedEngine:
    """Return the only engine."""
    [engine] = node.server.registry.engines.values()
    return engine


def _advance(reservations: Any, seconds: float) -> None:
    clock = reservations._clock
    reservations._clock = lambda: clock() + seconds
