"""Clients of a dead, stopped, slow or restarted node: no call blocks, and no slot is lost."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvtier.cache.guard import PartitionFacts
from kvtier.node.client.cache import NodeSignal
from kvtier.node.client.channel import Channel, NodeClient, NodeError
from kvtier.node.client.tier import NodeTier
from kvtier.node.wire import protocol
from kvtier.node.wire.frame_socket import FrameSocket
from kvtier.testing.storage_suite import GROUP
from kvtier.testing.storage_user import User
from kvtier.tiers import Outcome, StorageSite
from kvtier.tiers.breaker import BreakerState
from tests.kit.nodes import NodeProcess
from tests.kit.waiting import wait_until
from tests.node.harness import (
    BLOCK,
    SCOPE,
    LocalNode,
    bare,
    config_of,
    keys,
    local_node,
    node_process,
)

THERE, ABSENT, DAMAGED, FAILED = Outcome
FACTS = PartitionFacts(SCOPE, BLOCK, 8)
SOME = keys(1, 2, 3)
SOON_S = 30.0
SLACK_S = 5.0
"""Far above any deadline here, far below a wait without one."""


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set long internal time-outs for busy machines: only a call's own time-out counts here."""
    monkeypatch.setattr("kvtier.node.client.tier.ANSWER_S", SOON_S)


@contextmanager
def busy(node: LocalNode) -> Iterator[None]:
    """Keep the node's thread busy meanwhile."""
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(SOON_S)

    thread = threading.Thread(target=node.do, args=(work,))
    thread.start()
    begun.wait(SOON_S)
    try:
        yield
    finally:
        go_on.set()
        thread.join()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[NodeProcess]:
    with node_process(tmp_path) as process:
        yield process


def soon() -> float:
    return time.monotonic() + SOON_S


class Engine:
    """A client with one connection in use, and its partition. Close it."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.client = NodeClient(path, engine=name)
        self.take()

    def take(self) -> None:
        self.channel = self.client.take(soon())
        self.partition = self.channel.partition(FACTS, soon())
        self.number = self.partition.number

    def put_back(self, error: NodeError | None = None) -> None:
        self.client.put_back(self.channel, error)

    def look_up(self) -> protocol.LookupAnswer:
        request = protocol.LookupRequest(0, self.number, SOME)
        return self.channel.request(request, protocol.LookupAnswer, soon())

    def reserve(self, until_s: float | None = None) -> protocol.ReserveAnswer:
        request = protocol.ReserveRequest(0, self.number, SOME)
        return self.channel.request(request, protocol.ReserveAnswer, until_s or soon())

    def close(self) -> None:
        self.put_back()
        self.client.close()


@pytest.fixture
def engine(node: LocalNode) -> Iterator[Engine]:
    made = Engine(node.config.socket)
    yield made
    made.client.close()


def tier_of(path: Path) -> NodeTier:
    site = StorageSite(f"node:{path}", "node", GROUP, 64 * GROUP.bytes_per_block)
    return NodeTier(site, NodeClient(path))


def break_all(node: LocalNode) -> None:
    """The node closes all connections."""

    def close() -> None:
        for connection in list(node.server._connections):
            connection.close()

    node.do(close)


# -- notices and answers ---------------------------------------------------------------------------


def test_commit_outlives_the_connection(node: LocalNode, engine: Engine) -> None:
    told = engine.reserve()
    break_all(node)
    with pytest.raises(NodeError):
        engine.channel.notify(
            protocol.CommitNotice(engine.number, told.slots, protocol.pack([0, 1, 2]))
        )
    engine.put_back()
    engine.take()
    found = engine.look_up()
    assert found.places == bytes([protocol.MEMORY] * 3)
    engine.channel.notify(protocol.ReleaseNotice(engine.number, found.slots))
    engine.close()
    wait_until(lambda: node.num_used == 0)


def test_notice_without_a_connection_waits_for_one(node: LocalNode, engine: Engine) -> None:
    told, instance = engine.reserve(), engine.channel.mapped.instance
    engine.channel.close()
    engine.put_back()
    notice = protocol.AbortNotice(engine.number, told.slots)
    assert engine.client.tell(instance, notice) is None
    assert node.num_used == 3
    engine.take()
    engine.put_back()
    wait_until(lambda: node.num_used == 0)


def test_notice_goes_over_a_free_connection_at_once(node: LocalNode, engine: Engine) -> None:
    told = engine.reserve()
    engine.put_back()
    notice = protocol.AbortNotice(engine.number, told.slots)
    assert engine.client.tell(engine.channel.mapped.instance, notice) is engine.channel
    wait_until(lambda: node.num_used == 0)


def test_notice_on_memory_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    """The same slot numbers belong to other blocks in the new memory."""
    with local_node(tmp_path) as node:
        engine = Engine(node.config.socket)
        told, old = engine.reserve(), engine.channel.mapped
    with pytest.raises(NodeError):
        engine.look_up()
    engine.put_back()
    notice = protocol.AbortNotice(engine.number, told.slots)
    engine.client.tell(old.instance, notice)
    with local_node(tmp_path) as node:
        engine.take()
        assert engine.channel.mapped is not old
        assert engine.reserve().slots == told.slots, "the case that this is about"
        engine.put_back()
        engine.client.tell(old.instance, notice)
        engine.take()
        engine.put_back()
        assert node.num_used == 3
        engine.client.close()


def test_answer_that_comes_too_late_is_undone(node: LocalNode, engine: Engine) -> None:
    with busy(node), pytest.raises(NodeError, match="in time"):
        engine.reserve(time.monotonic() + 0.01)
    assert engine.channel.is_open
    wait_until(lambda: node.num_used == 3)
    assert engine.look_up().places == bytes([protocol.ARRIVING] * 3)
    wait_until(lambda: node.num_used == 0)
    engine.put_back()


def test_late_answer_is_undone_though_the_client_asks_nothing_more(
    node: LocalNode, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that the slots are seen in use
    monkeypatch.setattr("kvtier.node.client.channel.LISTEN_S", 0.5)
    with busy(node):
        with pytest.raises(NodeError, match="in time") as caught:
            engine.reserve(time.monotonic() + 0.01)
        engine.put_back(caught.value)
    wait_until(lambda: node.num_used == 3)
    wait_until(lambda: node.num_used == 0)
    wait_until(lambda: not any(each.name == "kvtier-node-late" for each in threading.enumerate()))


def test_no_two_threads_hear_a_connection_at_a_time(
    node: LocalNode, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One waits for late answers, and the engine's thread checks whether a wait is over."""
    hearing: list[str] = []
    overlaps: list[str] = []
    hear = Channel.hear

    def slow_hear(channel: Channel) -> None:
        overlaps.extend(hearing)
        hearing.append(threading.current_thread().name)
        time.sleep(0.002)
        hear(channel)
        hearing.pop()

    monkeypatch.setattr("kvtier.node.client.channel.LISTEN_S", 0.0)
    monkeypatch.setattr(Channel, "hear", slow_hear)
    with busy(node):
        with pytest.raises(NodeError, match="in time") as caught:
            engine.reserve(time.monotonic() + 0.01)
        engine.put_back(caught.value)
        signal = NodeSignal(engine.client, engine.channel, 1)
        for _ in range(50):
            assert signal.is_over
    assert not overlaps


def test_partition_that_opens_too_late_is_there_next_time(node: LocalNode) -> None:
    client = NodeClient(node.config.socket)
    channel = client.take(soon())
    with busy(node), pytest.raises(NodeError, match="in time"):
        channel.partition(FACTS, time.monotonic() + 0.01)
    other = PartitionFacts(SCOPE, 2 * BLOCK, 8)
    assert len(channel.partition(other, soon()).generations) == 32
    assert len(channel.partition(FACTS, time.monotonic()).generations) == 64
    client.put_back(channel)
    client.close()


def test_late_answers_before_a_goodbye_are_undone(node: LocalNode) -> None:
    """An engine of two processes keeps no slots of the one that leaves."""
    first, second = (Engine(node.config.socket, "both") for _ in range(2))
    second.put_back()
    with busy(node):
        with pytest.raises(NodeError):
            first.reserve(time.monotonic() + 0.01)
        first.put_back()
        closing = threading.Thread(target=first.client.close)
        closing.start()
    closing.join()
    wait_until(lambda: node.num_used == 0)
    assert len(node.server.registry.engines) == 1
    second.client.close()
    wait_until(lambda: not node.server.registry.engines)


def test_close_after_a_lost_connection_says_goodbye_over_a_new_one(
    node: LocalNode, engine: Engine
) -> None:
    engine.reserve()
    engine.put_back()
    break_all(node)
    assert node.num_used == 3
    engine.client.close()
    wait_until(lambda: not node.server.registry.engines)


def test_connection_in_use_at_the_close_says_goodbye_later(node: LocalNode, engine: Engine) -> None:
    engine.reserve()
    engine.client.close()
    assert node.num_used == 3
    engine.put_back()
    assert not engine.channel.is_open
    wait_until(lambda: not node.server.registry.engines)


def test_lost_connections_are_not_tried_one_by_one(node: LocalNode, engine: Engine) -> None:
    """After a restart the first call finds the node again."""
    channels = [engine.channel, *(engine.client.take(soon()) for _ in range(4))]
    for channel in channels:
        engine.client.put_back(channel)
    break_all(node)
    engine.take()
    assert engine.look_up().places == bytes(3)
    assert engine.client.breaker.state is BreakerState.CLOSED
    engine.put_back()


def test_slot_that_was_given_to_another_block_is_not_used(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check holds even if the node broke its promise to keep a leased slot."""
    tier = tier_of(node.config.socket)
    user = User(tier)
    assert user.put(0, 1) == [THERE] * 2
    send = FrameSocket.send

    def reassign(frames: FrameSocket, frame: bytes, *args: object, **kw: object) -> None:
        message = protocol.decode_node(frame[protocol.FRAME_HEADER.size :])
        if isinstance(message, protocol.LookupAnswer) and message.slots:
            (partition,) = node.node.partitions
            partition.tier.generations[protocol.unpack(message.slots)[:1]] += 1
        send(frames, frame, *args, **kw)  # type: ignore[arg-type]

    monkeypatch.setattr(FrameSocket, "send", reassign)
    assert user.get(0, 1) == [DAMAGED, THERE]
    tier.close()


# -- a node that is gone, or stopped ---------------------------------------------------------------


def test_new_memory_is_mapped_and_the_old_one_left(tmp_path: Path) -> None:
    """Memory of a node that is gone is freed, though engines had mapped it."""
    with local_node(tmp_path) as node:
        tier = tier_of(node.config.socket)
        user = User(tier)
        assert user.put(1) == user.get(1) == [THERE]
    assert user.get(1) == [FAILED]
    with local_node(tmp_path) as node:
        assert user.get(1) == [ABSENT]
        assert user.put(1, 2) == user.get(1, 2) == [THERE] * 2
        gc.collect()  # the node before was in this process, too
        with open("/proc/self/maps") as maps:
            mine = [line for line in maps if str(node.config.directory / "memory") in line]
        assert len([line for line in mine if "(deleted)" in line]) == 0
        tier.close()


def test_node_that_was_killed_is_a_miss_and_is_found_again(process: NodeProcess) -> None:
    tier = tier_of(process.socket)
    user = User(tier)
    assert user.put(1, 2) == [THERE] * 2
    process.kill()
    assert user.get(1, 2) == user.put(3, 4) == [FAILED] * 2
    process.start()
    wait_until(lambda: user.put(1) == [THERE])
    assert user.get(1) == [THERE]
    assert user.get(2)[0] in (THERE, ABSENT), "it may have had its checksum, or not"
    tier.close()


def test_stopped_node_delays_no_call_beyond_its_deadline(process: NodeProcess) -> None:
    """Neither requests, nor notices, nor new connections, nor the close."""
    engine = Engine(process.socket)
    told = engine.reserve()
    process.pause()
    began_s = time.monotonic()
    with pytest.raises(NodeError, match="in time"):
        engine.reserve(time.monotonic() + 0.02)
    engine.channel.notify(protocol.AbortNotice(engine.number, told.slots))
    notice = protocol.UseNotice(engine.number, keys(*range(4000)))
    for _ in range(200):  # more than the socket takes
        engine.channel.notify(notice)
    with pytest.raises(NodeError, match="in time"):
        Channel(process.socket, engine.client._hello, time.monotonic() + 0.02, lambda _: None)
    assert time.monotonic() - began_s < SLACK_S
    process.resume()
    assert engine.look_up().places == bytes(3), "the notice has arrived"
    process.pause()
    began_s = time.monotonic()
    engine.close()
    assert time.monotonic() - began_s < SLACK_S
    process.resume()


def test_full_backlog_of_a_stopped_node_delays_nobody(process: NodeProcess) -> None:
    process.pause()
    waiting = []
    try:
        while True:
            each = socket.socket(socket.AF_UNIX)
            each.setblocking(False)
            waiting.append(each)
            try:
                each.connect(str(process.socket))
            except BlockingIOError:
                break
        began_s = time.monotonic()
        client = NodeClient(process.socket)
        with pytest.raises(NodeError):
            client.take(time.monotonic() + 0.05)
        assert time.monotonic() - began_s < SLACK_S
    finally:
        for each in waiting:
            each.close()
        process.resume()


def test_breaker_opens_and_closes_again(process: NodeProcess) -> None:
    """While it is open no call costs a time-out."""
    tier = tier_of(process.socket)
    user = User(tier, timeout_s=0.0)
    patient = User(tier)
    assert patient.put(1) == [THERE]
    process.pause()
    while tier.breaker is not BreakerState.OPEN:
        assert user.get(1) == [FAILED]
    asked = []
    tier._client._idle_channel = lambda: asked.append(1)  # type: ignore[method-assign]
    assert user.get(1) == [FAILED]
    assert not asked, "nothing is asked"
    del tier._client._idle_channel
    process.resume()
    wait_until(lambda: patient.get(1) == [THERE])
    assert tier.breaker is BreakerState.CLOSED
    tier.close()


def test_notice_tells_the_breaker_nothing(process: NodeProcess) -> None:
    """A stopped node's socket still accepts a notice, so a sent notice is no sign of life."""
    engine = Engine(process.socket)
    engine.put_back()
    process.pause()
    for _ in range(3):
        engine.client.note(NodeError("late"))
    assert engine.client.breaker.is_open
    notice = protocol.ReleaseNotice(engine.number, protocol.pack([1]))
    engine.client.tell(engine.channel.mapped.instance, notice)
    assert engine.client.breaker.is_open
    process.resume()
    engine.client.close()


def test_forked_child_uses_nothing_of_its_parent(node: LocalNode, engine: Engine) -> None:
    told = engine.reserve()
    engine.put_back()
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(NodeError):
                engine.client.take(soon())
            notice = protocol.AbortNotice(engine.number, told.slots)
            engine.client.tell(engine.channel.mapped.instance, notice)
            engine.client.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert node.num_used == 3


def test_node_of_another_version_is_refused(node: LocalNode) -> None:
    with bare(node.config.socket) as engine:
        newer = protocol.AttachRequest(1, 99, "new", oldest_version=98)
        assert isinstance(engine.ask(newer), protocol.RefusedAnswer)
        compatible = protocol.AttachRequest(2, 99, "new", oldest_version=protocol.VERSION)
        assert engine.ask(compatible).version == protocol.VERSION


def test_memory_that_was_mapped_is_the_nodes(node: LocalNode, engine: Engine) -> None:
    told = engine.reserve()
    slot = protocol.unpack(told.slots).tolist()[0]
    mapped = np.frombuffer(engine.channel.mapped.memory.owner, np.uint8)  # type: ignore[call-overload]
    mapped[slot * BLOCK : (slot + 1) * BLOCK] = 7
    own = np.frombuffer(node.node.memory.memory.owner, np.uint8)  # type: ignore[call-overload]
    assert (own[slot * BLOCK : (slot + 1) * BLOCK] == 7).all()
    assert engine.partition.generations[slot] == protocol.unpack(told.generations)[0]
    assert config_of(node.config.socket.parent).host_bytes == engine.channel.mapped.memory.nbytes
    engine.put_back()


@pytest.mark.parametrize("lost", [1, 2])
def test_memory_that_does_not_arrive_is_a_failed_call(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """The kernel drops descriptors if the process has reached its limit of open files."""
    plain = protocol.receive
    passed: list[int] = []

    def receive(connection: socket.socket, frames: protocol.Frames) -> tuple[int, list[int]]:
        num, fds = plain(connection, frames)
        for fd in list(fds):
            passed.append(fd)
            if len(passed) == lost:
                os.close(fd)
                fds.remove(fd)
        return num, fds

    monkeypatch.setattr(protocol, "receive", receive)
    with pytest.raises(NodeError, match="too many files"):
        Engine(node.config.socket)
    engine = Engine(node.config.socket)
    assert len(engine.partition.generations)
    engine.close()


def test_memory_that_is_shorter_than_the_node_says_is_a_failed_call(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.node.memory, "num_bytes", 2 * node.node.memory.num_bytes)
    client = NodeClient(node.config.socket)
    with pytest.raises(NodeError, match="can't be mapped"):
        client.take(soon())
    client.close()
