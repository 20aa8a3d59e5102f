"""Events of a real engine, read over ZeroMQ as a router reads them."""

from __future__ import annotations

import re
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any

import msgspec
import pytest
import zmq

from kvtier.core.config import CacheConfig
from kvtier.core.errors import ConfigError
from kvtier.core.types import DEVICE, HOST, BlockId
from kvtier.observe.block_events import BlockEvents, BlockLog
from kvtier.observe.event_peers import MAX_PEERS, NUM_REFUSED
from kvtier.observe.publisher import END, Publisher, is_local
from kvtier.serve.engine import Engine, EngineConfig, SamplingParams
from kvtier.serve.server.config import ServerConfig
from kvtier.serve.server.service import Service
from tests.kit.waiting import wait_until
from tests.observe.test_block_events import Reader

from .conftest import MODEL

pytestmark = pytest.mark.engine

ANY_PORT = "tcp://127.0.0.1:*"


class Router:
    """Subscribes, notices gaps, and requests missed batches. batches: by number."""

    def __init__(self, events: str, replay: str, topic: str) -> None:
        self.context = zmq.Context()
        self.topic = topic.encode()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, self.topic)
        self.sub.connect(events)
        # A REQ socket takes one answer per request; a replay has many.
        self.asking = self.context.socket(zmq.DEALER)
        self.asking.connect(replay)
        self.batches: dict[int, list[Any]] = {}

    def receive(self) -> int:
        """Receive all pending batches. Return the number of batches so far."""
        while self.sub.poll(50):
            topic, number, payload = self.sub.recv_multipart()
            assert topic == self.topic
            self._take(number, payload)
        return len(self.batches)

    def replay(self, first: int) -> None:
        self.asking.send_multipart([b"", struct.pack(">Q", first)])
        while True:
            assert self.asking.poll(10_000), "no answer"
            empty, topic, number, payload = self.asking.recv_multipart()
            assert empty == b""
            if number == END:
                return
            assert topic == self.topic
            self._take(number, payload)

    def _take(self, number: bytes, payload: bytes) -> None:
        (at,) = struct.unpack(">Q", number)
        self.batches[at] = msgspec.msgpack.decode(payload)

    def reader(self) -> Reader:
        """Return a reader's state after all batches, in order, without a gap."""
        assert sorted(self.batches) == list(range(len(self.batches)))
        found = Reader()
        for at in sorted(self.batches):
            found.read(self.batches[at][1])
        return found

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextmanager
def router(endpoints: list[str], topic: str = "") -> Iterator[Router]:
    events, replay = endpoints
    made = Router(events, replay, topic)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def publisher(log: BlockLog, topic: str = "") -> Iterator[Publisher]:
    made = Publisher(log, ANY_PORT, ANY_PORT, topic)
    made.start(BlockEvents([DEVICE, HOST], [], 2))
    wait_until(lambda: made._num_sent == 1, "it begins")
    try:
        yield made
    finally:
        made.close()
        made.close()


def send(log: BlockLog, made: Publisher, at: int) -> None:
    """Send a batch: the one-block prompt ``at`` arrives on the device and in host memory."""
    num_sent = made._num_sent
    log.moved(HOST, [BlockId(at)], False)
    log.name(bytes([at]), "")
    log.prompt(bytes([at]), [bytes(8)], [BlockId(at)], (DEVICE,))
    wait_until(lambda: made._num_sent > num_sent, "a batch is sent")


def join(log: BlockLog, reads: Router) -> None:
    """Wait until the subscription delivers events."""

    def arrives() -> bool:
        log.lose()
        return reads.receive() > 0

    wait_until(arrives, "a batch arrives")
    wait_until(lambda: not log._was_lost, "the publisher begins anew")


def test_a_missed_batch_is_asked_for_again() -> None:
    log = BlockLog()
    with publisher(log, topic="kv@me") as made, router(made.endpoints, "kv@me") as reads:
        join(log, reads)
        for at in range(20):
            send(log, made, at)
        wait_until(lambda: reads.receive() > 20, "all arrive")
        last = max(reads.batches)
        assert 0 not in reads.batches, "what was sent before anybody listened"
        for lost in range(last - 15, last, 3):
            del reads.batches[lost]
        reads.replay(0)
        found = reads.reader()
    assert [len(found.held[tier]) for tier in (DEVICE, HOST)] == [20, 20]


def test_a_replay_begins_where_it_is_asked_to_and_bad_questions_get_none() -> None:
    log = BlockLog()
    with publisher(log) as made, router(made.endpoints) as reads:
        reads.replay(0)
        assert list(reads.batches) == [0]
        assert reads.batches[0][1] == [{"type": "AllBlocksCleared"}]
        reads.batches.clear()
        assert reads.asking is not None
        for question in ([b"", b"short"], [b"x", bytes(8)], [bytes(8)], [b"", bytes(9000)]):
            reads.asking.send_multipart(question)
        assert not reads.asking.poll(200)
        with router(made.endpoints) as other:
            other.replay(1)
            assert not other.batches
            other.replay(0)
            assert list(other.batches) == [0]


@pytest.mark.slow
@pytest.mark.nightly
def test_readers_that_do_not_read_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for readers that do not read, and for replays, is bounded."""
    monkeypatch.setattr("kvtier.observe.publisher.MAX_KEPT", 50)
    monkeypatch.setattr("kvtier.observe.publisher.MAX_UNREAD", 5)
    log = BlockLog()
    with publisher(log) as made, router(made.endpoints) as sleeps:
        sleeps.sub.setsockopt(zmq.RCVHWM, 5)
        for at in range(200):
            send(log, made, at)
        assert len(made._kept) == 50
        with router(made.endpoints) as asks:
            asks.replay(0)
            assert sorted(asks.batches) == list(range(made._num_sent - 50, made._num_sent))


def test_a_late_reader_gets_the_present_state_and_continues_with_live_batches() -> None:
    log = BlockLog()
    with publisher(log) as made, router(made.endpoints) as late:
        for at in range(40):
            send(log, made, at)
        log.moved(DEVICE, [BlockId(0), BlockId(1)], True)
        late.asking.send_multipart([b"", b"snapshot"])
        assert late.asking.poll(10_000), "no answer"
        _, number, _, *batches = late.asking.recv_multipart()
        last = int.from_bytes(number, "big", signed=True)
        assert last == made._num_sent - 1
        found = Reader()
        for payload in batches:
            found.read(msgspec.msgpack.decode(payload)[1])
        assert [len(found.held[tier]) for tier in (DEVICE, HOST)] == [38, 40]
        send(log, made, 40)
        wait_until(lambda: late.receive() and last + 1 in late.batches, "it continues")
        found.read(late.batches[last + 1][1])
    assert [len(found.held[tier]) for tier in (DEVICE, HOST)] == [39, 41]


def test_all_that_wait_get_one_snapshot_and_one_that_has_left_costs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.observe.publisher.SNAPSHOT_SHARE", 1e-9)  # one, and no second one
    log = BlockLog()
    with publisher(log) as made, router(made.endpoints) as reads, router(made.endpoints) as other:
        send(log, made, 0)
        made._snapshot_at = inf
        with router(made.endpoints) as leaves:
            leaves.asking.send_multipart([b"", b"snapshot"])
            wait_until(lambda: len(made._wants_snapshot) == 1, "it asks")
        for each in reads, other:
            each.asking.send_multipart([b"", b"snapshot"])
        wait_until(lambda: len(made._wants_snapshot) == 3, "all ask")
        made._snapshot_at = 0.0
        for each in reads, other:
            assert each.asking.poll(5000), "no answer"
        assert reads.asking.recv_multipart() == other.asking.recv_multipart()
        assert not made._wants_snapshot


def test_a_publisher_that_fails_has_readers_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    log = BlockLog()
    with publisher(log) as made, router(made.endpoints) as reads:
        log.name(b"", "")
        log.prompt(b"", [bytes(8)], [BlockId(0)], (DEVICE,))
        log.prompt(b"", [bytes(8)], [BlockId(1)], ("no such tier",))
        wait_until(lambda: made._num_sent == 2, "all is cleared")
        log.prompt(b"", [bytes(8)], [BlockId(2)], (DEVICE,))
        wait_until(lambda: made._num_sent == 3, "it goes on")
        reads.replay(0)
        assert len(reads.reader().held[DEVICE]) == 1
    assert "events not published" in caplog.text


def test_addresses_that_cant_be_used_are_told() -> None:
    with publisher(BlockLog()) as made:
        taken = made.endpoints[0]
        for address in (taken, "5557", "tcp://no.such.host.invalid:1"):
            with pytest.raises(ConfigError, match="events: can't publish at"):
                Publisher(BlockLog(), address)
    with pytest.raises(ConfigError, match="events_replay: 'tcp://x' without events"):
        EngineConfig(events_replay="tcp://x")
    assert is_local("tcp://127.0.0.1:5557")
    assert not is_local("tcp://0.0.0.0:5557")


def test_an_engine_tells_routers_what_it_has() -> None:
    config = EngineConfig(
        model=MODEL,
        device_capacity="16MiB",
        threads=1,
        cache=CacheConfig(host_capacity="4x", strict=True),
        events=ANY_PORT,
        events_replay=ANY_PORT,
    )
    prompt = [at % 250 for at in range(700)]
    with Engine(config) as engine, router(engine._publisher.endpoints) as reads:
        for salt in ("", "", "other"):
            completion = engine.submit(prompt, SamplingParams(max_tokens=1), salt=salt).result(60)
            assert completion.finish_reason == "length"
        assert engine.drain()
        size = engine.info.chunk_tokens
        num = 640 // size
        wait_until(lambda: _has(reads, {DEVICE: 2 * num, HOST: 2 * num}), "all is told")
        told = reads.reader()
        first = next(each for each in reads.batches[1][1] if each["medium"] == "GPU")
        assert first["token_ids"] == prompt[:640]
        assert (first["block_size"], first["parent_block_hash"]) == (size, None)
        assert len(told.ever) == 2 * num, "tenants share no hash"
        engine.clear_tier(DEVICE)
        wait_until(lambda: _has(reads, {DEVICE: 0, HOST: 2 * num}), "what left is told")
        engine.submit(prompt, SamplingParams(max_tokens=1)).result(60)
        wait_until(lambda: _has(reads, {DEVICE: num, HOST: 2 * num}), "a load is told")
        assert reads.reader().ever == told.ever, "the same hashes again"


def test_a_server_leaves_descriptors_to_readers_of_its_events(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both addresses count: events, and replays."""
    plain = EngineConfig(model=MODEL, device_capacity="16MiB", threads=1)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1000, 1000))
    found = []
    for config in (plain, replace(plain, events=ANY_PORT, events_replay=ANY_PORT)):
        with Engine(config) as engine:
            Service(engine, ServerConfig(max_connections=5000)).close()
        found.append(int(re.findall(r"connections limited max=(\d+)", caplog.text)[-1]))
    without, beside = found
    assert without - beside >= 2 * (MAX_PEERS + NUM_REFUSED)


def _has(reads: Router, wanted: dict[str, int]) -> bool:
    reads.replay(0)
    held = reads.reader().held
    return {tier: len(held[tier]) for tier in wanted} == wanted


def test_without_a_listener_nothing_is_noted(engine: Engine) -> None:
    assert engine._publisher is None
    assert engine.cache._observer._events is None
    assert engine.cache._ladder._transfers._on_change is None
