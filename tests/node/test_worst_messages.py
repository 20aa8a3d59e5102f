"""No message of an engine holds up the others for long, whatever it contains.

Bounds are on processor time of the node's own thread, by its longest callback, and relative to the
plainest message of full length: a look-up of ``MAX_KEYS`` keys.
"""

from __future__ import annotations

import asyncio
import gc
import time
from asyncio import Handle
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from kvtier.cache.local import LocalBlockCache
from kvtier.node.config import EventsAddress
from kvtier.node.server.engines import Holdings
from kvtier.node.server.partition import Partition
from kvtier.node.wire import protocol
from kvtier.node.wire.protocol import (
    MAX_AT_ONCE,
    MAX_KEYS,
    MAX_MEASURED,
    MAX_STATEMENTS,
    FromEngine,
    pack,
)
from tests.node.harness import Bare, LocalNode, bare, local_node

KEY_BYTES = 8
BLOCK_BYTES = 1 << 10
MAX_SLOTS = (protocol.MAX_FRAME_BYTES - 64) // 8
TIMES = 16
"""A message may hold up the node so many times longer than a look-up. Most need less than four, and
a look-up may happen to be twice as fast."""


class Clock:
    """Processor time of the longest callback of event loops since it was set to 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest_s = 0.0
        run = Handle._run

        def timed(handle: Handle) -> None:
            began_s = time.thread_time()
            run(handle)
            self.longest_s = max(self.longest_s, time.thread_time() - began_s)

        monkeypatch.setattr(Handle, "_run", timed)
        monkeypatch.setattr("uvloop.new_event_loop", asyncio.new_event_loop)


class Harness:
    """A node whose memory holds ``MAX_KEYS`` blocks, all of them in use by one engine.

    known: keys of the blocks, shuffled. leased: their slots. usual_s: time that a look-up of them
    in another order holds up the node.
    """

    def __init__(self, node: LocalNode, clock: Clock, engine: Bare) -> None:
        self.node, self.clock, self.engine = node, clock, engine
        engine.attach("worst")
        self.partition = engine.open(BLOCK_BYTES, KEY_BYTES).partition
        self.known = shuffled(0)
        self.leased = b""
        self.usual_s = 0.0

    def fill(self) -> None:
        told = self.ask(protocol.ReserveRequest(9, self.partition, self.known))
        depths = pack(range(len(told.slots) // 8))
        self.engine.send(protocol.CommitNotice(self.partition, told.slots, depths))
        self.leased = self.ask(protocol.LookupRequest(9, self.partition, self.known)).slots
        assert len(self.leased) == 8 * MAX_KEYS
        others = np.random.default_rng(9).permutation(np.frombuffer(self.known, "<i8")).tobytes()
        for _ in range(3):
            self.usual_s = max(
                self.usual_s, self.time_of(protocol.LookupRequest(9, self.partition, others, True))
            )
            self.engine.send(protocol.ReleaseNotice(self.partition, self.leased))

    def ask(self, message: Any) -> Any:
        """Return the answer to a request; a notice may come before it."""
        self.engine.send(message)
        while getattr(answer := self.engine.receive(), "id", None) != message.id:
            assert answer is not None, "the node has closed the connection"
        return answer

    def time_of(self, message: FromEngine) -> float:
        """Send a message. Return the longest time that it holds up the node."""
        self.clock.longest_s = 0.0
        if isinstance(message, protocol.PartitionRequest):
            self.ask(message)
        else:
            self.engine.send(message)
        self.ask(protocol.OpenRequest(8, b"s" * 32, BLOCK_BYTES, KEY_BYTES))  # comes behind it
        return self.clock.longest_s


def shuffled(seed: int) -> bytes:
    """Return ``MAX_KEYS`` keys in random order."""
    keys = np.arange(MAX_KEYS, dtype="<i8") + seed * MAX_KEYS
    np.random.default_rng(seed).shuffle(keys)
    return keys.tobytes()


@pytest.fixture
def harness(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Harness]:
    clock = Clock(monkeypatch)
    gc.disable()  # a collection takes as long as the objects of all tests need
    with (
        local_node(
            tmp_path_factory.mktemp("node"),
            host_capacity="64MiB",
            segment_capacity="1MiB",
            events={"": EventsAddress("tcp://127.0.0.1:*")},
        ) as node,
        bare(node.config.socket) as engine,
    ):
        yield Harness(node, clock, engine)
    gc.enable()


def described(partition: int, keys: bytes, tokens: bytes) -> protocol.DescribeNotice:
    """Return a description of blocks whose hashes are their keys."""
    size = len(tokens) // (4 * (len(keys) // 8))
    return protocol.DescribeNotice(partition, keys, "model", size, 8, keys, b"", tokens, True)


MAX_DESCRIBED_BYTES = 14 << 20
SAID = [(at % 5, 7, at * 100, MAX_KEYS, 100.0) for at in range(MAX_STATEMENTS)]
SLOT_OF_ALL = pack([0] * MAX_SLOTS)
WORST: dict[type[FromEngine], Callable[[Harness], list[FromEngine]]] = {
    protocol.OpenRequest: lambda its: [protocol.OpenRequest(9, b"t", BLOCK_BYTES, 120)],
    protocol.LookupRequest: lambda its: [
        protocol.LookupRequest(9, its.partition, shuffled(1), True)
    ],
    protocol.FetchRequest: lambda its: [
        protocol.FetchRequest(9, its.partition, keys, 1.0) for keys in (its.known, shuffled(1))
    ],
    protocol.ReserveRequest: lambda its: [
        protocol.ReserveRequest(9, its.partition, shuffled(1)),  # all are in use
        protocol.ReleaseNotice(its.partition, its.leased),
        protocol.ReserveRequest(9, its.partition, shuffled(2)),  # all are evicted
    ],
    protocol.PromoteRequest: lambda its: [
        protocol.PromoteRequest(9, its.partition, shuffled(1), its.known),
        protocol.PromoteRequest(9, its.partition, its.known, its.known),
    ],
    protocol.FindRequest: lambda its: [protocol.FindRequest(9, its.partition, its.known, 1.0)],
    protocol.DeleteRequest: lambda its: [
        protocol.DeleteRequest(9, its.partition, its.known),  # while they are in use
        protocol.LookupRequest(9, its.partition, its.known),
        protocol.ReleaseNotice(its.partition, its.leased),
        protocol.DeleteRequest(9, its.partition, its.known),
    ],
    protocol.CommitNotice: lambda its: [
        protocol.CommitNotice(
            its.partition, SLOT_OF_ALL[: MAX_SLOTS // 2 * 8], bytes(MAX_SLOTS // 2 * 8)
        ),
    ],
    protocol.AbortNotice: lambda its: [protocol.AbortNotice(its.partition, SLOT_OF_ALL)],
    protocol.ReleaseNotice: lambda its: [protocol.ReleaseNotice(its.partition, SLOT_OF_ALL)],
    protocol.DistrustNotice: lambda its: [
        protocol.DistrustNotice(its.partition, its.leased * 4),
        protocol.LookupRequest(9, its.partition, its.known),
        protocol.ReleaseNotice(its.partition, its.leased),
    ],
    protocol.WatchNotice: lambda its: [protocol.WatchNotice(its.partition, 1, its.known)],
    protocol.UseNotice: lambda its: [protocol.UseNotice(its.partition, its.known)],
    protocol.PromptNotice: lambda its: [
        protocol.PromptNotice(its.partition, shuffled(seed)) for seed in (0, 1)
    ],
    protocol.ContinueNotice: lambda its: [
        protocol.ContinueNotice(its.partition, shuffled(seed), its.known[:8]) for seed in (0, 1)
    ],
    protocol.HintNotice: lambda its: [
        protocol.HintNotice(its.partition, shuffled(seed), SAID) for seed in (0, 1)
    ],
    protocol.DescribeNotice: lambda its: [
        described(its.partition, its.known, bytes(MAX_DESCRIBED_BYTES)),
        described(its.partition, shuffled(1), bytes(4 * MAX_KEYS)),
        described(its.partition, its.known[:8], bytes(MAX_DESCRIBED_BYTES)),
    ],
    protocol.CostsNotice: lambda its: [
        protocol.CostsNotice(its.partition, [("a" * 256, "b", 1, 1.0, 1)] * MAX_MEASURED)
    ],
    protocol.ReportNotice: lambda its: [protocol.ReportNotice(1 << 63, 1 << 63)],
}


@pytest.mark.parametrize("kind", WORST, ids=lambda kind: kind.__name__)
def test_worst_message_of_a_kind_does_not_hold_up_the_node(
    harness: Harness, kind: type[FromEngine]
) -> None:
    harness.fill()
    for message in WORST[kind](harness):
        took_s = harness.time_of(message)
        assert took_s < TIMES * harness.usual_s, f"{type(message).__name__}: {took_s} s"


def test_message_that_changes_many_blocks_is_handled_in_turns(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[tuple[str, int]] = []

    def counted(of: type, name: str) -> None:
        work = getattr(of, name)

        def count(its: Any, some: Any, *args: Any) -> Any:
            turns.append((name, len(some)))
            return work(its, some, *args)

        monkeypatch.setattr(of, name, count)

    for name in "reserve", "commit", "abort":
        counted(Holdings, name)
    counted(Partition, "distrust_slots")
    counted(LocalBlockCache, "promote")
    harness.fill()
    harness.engine.send(protocol.ReleaseNotice(harness.partition, harness.leased))
    slots = harness.ask(protocol.ReserveRequest(9, harness.partition, shuffled(1))).slots
    harness.engine.send(
        protocol.DistrustNotice(harness.partition, slots),
        protocol.AbortNotice(harness.partition, slots),
    )
    harness.ask(protocol.PromoteRequest(9, harness.partition, shuffled(1), b""))
    names = {"reserve", "commit", "abort", "distrust_slots", "promote"}
    assert {name for name, _ in turns} == names
    assert max(num for _, num in turns) == MAX_AT_ONCE


def test_end_of_an_engine_does_not_hold_up_the_node(harness: Harness) -> None:
    """It uses all slots, and has leased them many times."""
    harness.fill()
    for _ in range(3):
        harness.ask(protocol.LookupRequest(9, harness.partition, harness.known))
    harness.clock.longest_s = 0.0
    harness.engine.send(protocol.DetachNotice())
    harness.node.until(lambda: not harness.node.server.registry.engines)
    assert harness.node.num_used == 0
    assert harness.clock.longest_s < TIMES * harness.usual_s


def test_every_kind_of_message_has_a_worst_one_and_a_bound() -> None:
    first_and_last = {protocol.AttachRequest, protocol.DetachNotice}
    assert {*WORST, *first_and_last} == {*get_args(FromEngine)}
    for kind in get_args(FromEngine):
        assert "\n    Work: " in str(kind.__doc__), f"{kind.__name__} has no bound on its work"


@pytest.mark.parametrize("num", [MAX_STATEMENTS + 1, 10**5])
def test_message_with_too_many_statements_is_refused_unread(num: int) -> None:
    many = msgspec.msgpack.encode(["HintNotice", 0, b"", [(0, 1, 0, 9, 1.0)] * num])
    began_s = time.thread_time()
    with pytest.raises(protocol.ProtocolError, match=str(MAX_STATEMENTS)):
        protocol.decode_engine(many)
    refused_s, began_s = time.thread_time() - began_s, time.thread_time()
    msgspec.msgpack.decode(many)
    assert num < 10**5 or refused_s < (time.thread_time() - began_s) / 10


@pytest.mark.parametrize(
    "content",
    [
        msgspec.msgpack.encode(["AttachRequest", 1, 1]).replace(b"\x93", b"\x94") + b"\xa2\xff\xfe",
        b"\x95\xa2\xff\xfe",
        b"\x94\xacDetachNotice" + b"\x91" * 10_000,
    ],
    ids=["text", "tag", "arrays in arrays"],
)
def test_content_that_no_codec_reads_is_an_unknown_message(content: bytes) -> None:
    with pytest.raises(protocol.ProtocolError, match="unknown message"):
        protocol.decode_engine(content)
