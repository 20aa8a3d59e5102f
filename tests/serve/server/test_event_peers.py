"""Readers of events are limited in number, and in the data queued for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from kvtier.core.types import DEVICE, HOST
from kvtier.observe import event_peers
from kvtier.observe.block_events import BlockEvents, BlockLog
from kvtier.observe.publisher import MAX_KEPT, Publisher
from tests.kit.waiting import wait_until

from .test_events import ANY_PORT, publisher, router, send

BATCH = bytes(6000)


@contextmanager
def idle_readers(made: Publisher, num: int) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.serve.server.idle_readers", *made.endpoints, str(num)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"asked\n"
        try:
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def dial(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").partition(":")
    made = socket.create_connection((host, int(port)))
    made.settimeout(30)
    return made


def is_open(connection: socket.socket) -> bool:
    """Whether ZeroMQ's greeting arrives and the connection stays open."""
    connection.settimeout(0.3)
    try:
        while connection.recv(64):
            pass
    except TimeoutError:
        return True
    except ConnectionError:
        return False
    return False


def num_peers(made: Publisher) -> list[int]:
    """Return the number of connections of each socket: events, replays."""
    return [len(door.peers) for door in made._peers._doors]


def test_readers_that_read_nothing_use_up_neither_memory_nor_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """200 readers request all kept batches. None is disconnected for it yet."""
    monkeypatch.setattr(event_peers, "STUCK_S", 600.0)
    made = Publisher(BlockLog(), ANY_PORT, ANY_PORT)
    for number in range(MAX_KEPT):
        made._keep(number, BATCH)
    made._num_sent = MAX_KEPT
    memory, descriptors = resident_bytes(), num_descriptors()
    made.start(BlockEvents([DEVICE, HOST], [], 2))
    with idle_readers(made, 200):
        full = [event_peers.MAX_PEERS] * 2
        wait_until(lambda: num_peers(made) == full, "the limit is reached")
        wait_until(lambda: len(made._answers) == event_peers.MAX_PEERS, "they don't read")
        most = descriptors + sum(full) + 2  # the pipes to the readers
        wait_until(lambda: num_descriptors() <= most, "the others were refused")
        with dial(made.endpoints[1]) as late:
            assert not is_open(late), "it is one too many"
        assert resident_bytes() - memory < 100 << 20
    wait_until(lambda: num_peers(made) == [0, 0], "they have gone")
    wait_until(lambda: not made._answers, "nothing is kept for them")
    with router(made.endpoints) as reads:
        reads.replay(MAX_KEPT)
        assert list(reads.batches) == [MAX_KEPT], "it goes on as before"
    made.close()


def test_one_that_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_peers, "MAX_PEERS", 3)
    with publisher(BlockLog()) as made:
        those = [dial(made.endpoints[0]) for _ in range(3)]
        wait_until(lambda: num_peers(made) == [3, 0], "they are let in")
        refused = dial(made.endpoints[0])
        assert not is_open(refused)
        assert all(map(is_open, those))
        those.pop().close()
        wait_until(lambda: num_peers(made) == [2, 0], "it has left")
        those.append(dial(made.endpoints[0]))
        assert is_open(those[-1])
        for each in (*those, refused):
            each.close()


def test_a_subscriber_far_behind_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that others read are not kept for the subscriber."""
    monkeypatch.setattr(event_peers, "MAX_BEHIND_BYTES", 1 << 20)
    monkeypatch.setattr(event_peers, "SWEEP_S", 0.02)
    log = BlockLog()
    with publisher(log) as made, router(made.endpoints) as reads, idle_readers(made, 1):
        wait_until(lambda: num_peers(made) == [2, 2], "all are there")
        monkeypatch.setattr(made, "_encode", lambda batch: bytes(1 << 18))
        monkeypatch.setattr(reads, "_take", lambda number, payload: reads.batches.update({0: []}))

        def falls_behind() -> bool:
            send(log, made, made._num_sent % 250)
            reads.receive()
            return num_peers(made)[0] == 1

        wait_until(falls_behind, "it is disconnected")
        reads.batches.clear()
        send(log, made, 255)
        assert reads.receive() == 1, "who reads is still there"


def test_one_that_asks_and_takes_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_peers, "STUCK_S", 0.1)
    monkeypatch.setattr(event_peers, "SWEEP_S", 0.02)
    made = Publisher(BlockLog(), ANY_PORT, ANY_PORT)
    for number in range(MAX_KEPT):
        made._keep(number, BATCH)
    made._num_sent = MAX_KEPT
    made.start(BlockEvents([DEVICE, HOST], [], 2))
    with idle_readers(made, 1):
        wait_until(lambda: bool(made._answers), "it has asked")
        wait_until(lambda: not made._answers, "it is given up")
        wait_until(lambda: num_peers(made)[1] == 0, "it is disconnected")
    made.close()


def test_one_that_takes_too_little_of_snapshots_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader that takes a little now and then is not stuck, and what it has asked for grows."""
    monkeypatch.setattr(event_peers, "STUCK_S", 600.0)
    monkeypatch.setattr(event_peers, "SWEEP_S", 0.02)
    monkeypatch.setattr(event_peers, "MAX_BEHIND_SNAPSHOTS_BYTES", 1 << 20)
    log = BlockLog()
    with publisher(log) as made, router(made.endpoints) as reads:
        send(log, made, 0)
        for number in range(1000):
            made._keep(made._num_sent + number, BATCH)
        made._num_sent += 1000
        with idle_readers(made, 1):
            wait_until(lambda: num_peers(made)[1] == 2, "both are there")
            monkeypatch.setattr(made, "_encode", lambda batch: bytes(1 << 18))

            def falls_behind() -> bool:
                reads.asking.send_multipart([b"", b"snapshot"])
                assert reads.asking.poll(10_000), "no answer"
                reads.asking.recv_multipart()
                return num_peers(made)[1] == 1

            wait_until(falls_behind, "it is disconnected")
            assert falls_behind(), "who reads is still there"


def test_connections_that_say_nothing_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.observe.publisher.HANDSHAKE_MS", 200)
    with publisher(BlockLog()) as made:
        silent = dial(made.endpoints[1])
        while silent.recv(64):  # the greeting, and then the end
            pass
        wait_until(lambda: num_peers(made) == [0, 0], "it has left")
        silent.close()


def test_a_slow_reader_gets_a_whole_replay() -> None:
    """The reader has room for one batch at a time."""
    made = Publisher(BlockLog(), ANY_PORT, ANY_PORT)
    for number in range(500):
        made._keep(number, BATCH)
    made._num_sent = 500
    made.start(BlockEvents([DEVICE, HOST], [], 2))
    asking: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    asking.setsockopt(zmq.RCVHWM, 1)
    asking.connect(made.endpoints[1])
    asking.send_multipart([b"", (100).to_bytes(8, "big")])
    numbers = []
    while (frames := asking.recv_multipart())[1:2] and frames[3] != b"":
        numbers.append(int.from_bytes(frames[2], "big"))
    assert numbers[:400] == list(range(100, 500))
    asking.close(linger=0)
    made.close()
