"""Clients of a dead, stopped, slow or restarted node: no call blocks, and no slot is lost."""

from __future__ import annotations

import gc
import os
import signal
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
from kvtier.node.client.channel import Channel, NodeClient, NodeError, OpenedPartition
from kvtier.node.client.tier import NodeTier
from kvtier.node.wire import protocol
from kvtier.node.wire.frame_socket import FrameSocket
from kvtier.testing.storage_suite import GROUP
from kvtier.testing.storage_user import User
from kvtier.tiers import Outcome, StorageSite
from kvtier.tiers.breaker import BreakerState
from tests.node.harness import (
    BLOCK,
    SCOPE,
    LocalNode,
    NodeProcess,
    bare,
    config_of,
    keys,
    local_node,
    node_process,
    wait_until,
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
def node(tmp_path: Path) -> Iterator[LocalNode]:
    with local_node(tmp_path) as node:
        yield node


@pytest.fixture
def process(tmp_path: Path) -> Iterator[NodeProcess]:
    with node_process(tmp_path) as process:
        yield process


def soon() -> float:
    return time.monotonic() + SOON_S


def enter(client: NodeClient) -> tuple[Channel, OpenedPartition]:
    channel = client.take(soon())
    return channel, channel.partition(FACTS, soon())


def look_up(channel: Channel, partition: OpenedPartition, some: bytes) -> protocol.LookupAnswer:
    request = protocol.LookupRequest(0, partition.number, some)
    return channel.request(request, protocol.LookupAnswer, soon())


def reserve(
    channel: Channel, partition: OpenedPartition, some: bytes, until_s: float | None = None
) -> protocol.ReserveAnswer:
    request = protocol.ReserveRequest(0, partition.number, some)
    return channel.request(request, protocol.ReserveAnswer, until_s or soon())


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


def test_commit_outlives_the_connection(node: LocalNode) -> None:
    client = NodeClient(node.config.socket)
    channel, partition = enter(client)
    told = reserve(channel, partition, SOME)
    break_all(node)
    with pytest.raises(NodeError):
        channel.notify(
            protocol.CommitNotice(partition.number, told.slots, protocol.pack([0, 1, 2]))
        )
    client.put_back(channel)
    channel, partition = enter(client)
    found = look_up(channel, partition, SOME)
    assert found.places == bytes([protocol.MEMORY] * 3)
    channel.notify(protocol.ReleaseNotice(partition.number, found.slots))
    client.put_back(channel)
    client.close()
    wait_until(lambda: node.num_used == 0)


def test_notice_without_a_connection_waits_for_one(node: LocalNode) -> None:
    client = NodeClient(node.config.socket)
    channel, partition = enter(client)
    told = reserve(channel, partition, SOME)
    instance = channel.mapped.instance
    channel.close()
    client.put_back(channel)
    assert client.tell(instance, protocol.AbortNotice(partition.number, told.slots)) is None
    assert node.num_used == 3
    client.put_back(enter(client)[0])
    wait_until(lambda: node.num_used == 0)
    client.close()


def test_notice_goes_over_a_free_connection_at_once(node: LocalNode) -> None:
    client = NodeClient(node.config.socket)
    channel, partition = enter(client)
    told = reserve(channel, partition, SOME)
    client.put_back(channel)
    notice = protocol.AbortNotice(partition.number, told.slots)
    assert client.tell(channel.mapped.instance, notice) is channel
    wait_until(lambda: node.num_used == 0)
    client.close()


def test_notice_on_memory_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    """The same slot numbers belong to other blocks in the new memory."""
    with local_node(tmp_path) as node:
        client = NodeClient(node.config.socket)
        channel, partition = enter(client)
        told = reserve(channel, partition, SOME)
        old = channel.mapped
    with pytest.raises(NodeError):
        look_up(channel, partition, SOME)
    client.put_back(channel)
    client.tell(old.instance, protocol.AbortNotice(partition.number, told.slots))
    with local_node(tmp_path) as node:
        channel, partition = enter(client)
        assert channel.mapped is not old
        again = reserve(channel, partition, SOME)
        assert again.slots == told.slots, "the case that this is about"
        client.put_back(channel)
        client.tell(old.instance, protocol.AbortNotice(partition.number, told.slots))
        client.put_back(enter(client)[0])
        assert node.num_used == 3
        client.close()


def test_answer_that_comes_too_late_is_undone(node: LocalNode) -> None:
    client = NodeClient(node.config.socket)
    channel, partition = enter(client)
    with busy(node), pytest.raises(NodeError, match="in time"):
        reserve(channel, partition, SOME, time.monotonic() + 0.01)
    assert channel.is_open
    wait_until(lambda: node.num_used == 3)
    assert look_up(channel, partition, SOME).places == bytes([protocol.ARRIVING] * 3)
    wait_until(lambda: node.num_used == 0)
    client.put_back(channel)
    client.close()


def test_late_answer_is_undone_though_the_client_asks_nothing_more(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvtier.node.client.channel.LISTEN_S", 0.5
    )  # so that the slots are seen in use
    client = NodeClient(node.config.socket)
    channel, partition = enter(client)
    with busy(node):
        with pytest.raises(NodeError, match="in time") as caught:
            reserve(channel, partition, SOME, time.monotonic() + 0.01)
        client.put_back(channel, caught.value)
    wait_until(lambda: node.num_used == 3)
    wait_until(lambda: node.num_used == 0)
    wait_until(lambda: not any(each.name == "kvtier-node-late" for each in threading.enumerate()))
    client.close()


def test_no_two_threads_hear_a_connection_at_a_time(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
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
    client = NodeClient(node.config.socket)
    channel, partition = enter(client)
    monkeypatch.setattr(Channel, "hear", slow_hear)
    with busy(node):
        with pytest.raises(NodeError, match="in time") as caught:
            reserve(channel, partition, SOME, time.monotonic() + 0.01)
        client.put_back(channel, caught.value)
        signal = NodeSignal(client, channel, 1)
        for _ in range(50):
            assert signal.is_over
    assert not overlaps
    client.close()


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
    first, second = (NodeClient(node.config.socket, engine="both") for _ in range(2))
    second.put_back(enter(second)[0])
    channel, partition = enter(first)
    with busy(node):
        with pytest.raises(NodeError):
            reserve(channel, partition, SOME, time.monotonic() + 0.01)
        first.put_back(channel)
        closing = threading.Thread(target=first.close)
        closing.start()
    closing.join()
    wait_until(lambda: node.num_used == 0)
    assert len(node.server.registry.engines) == 1
    second.close()
    wait_until(lambda: not node.server.registry.engines)


def test_close_after_a_lost_connection_says_goodbye_over_a_new_one(node: LocalNode) -> None:
    client = NodeClient(node.config.socket)
    channel, partition = enter(client)
    reserve(channel, partition, SOME)
    client.put_back(channel)
    break_all(node)
    assert node.num_used == 3
    client.close()
    wait_until(lambda: not node.server.registry.engines)


def test_connection_in_use_at_the_close_says_goodbye_later(node: LocalNode) -> None:
    client = NodeClient(node.config.socket)
    channel, partition = enter(client)
    reserve(channel, partition, SOME)
    client.close()
    assert node.num_used == 3
    client.put_back(channel)
    assert not channel.is_open
    wait_until(lambda: not node.server.registry.engines)


def test_lost_connections_are_not_tried_one_by_one(node: LocalNode) -> None:
    """After a restart the first call finds the node again."""
    client = NodeClient(node.config.socket)
    channels = [client.take(soon()) for _ in range(5)]
    for channel in channels:
        client.put_back(channel)
    break_all(node)
    channel, partition = enter(client)
    assert look_up(channel, partition, SOME).places == bytes(3)
    assert client.breaker.state is BreakerState.CLOSED
    client.put_back(channel)
    client.close()


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
    process.end(signal.SIGKILL)
    assert user.get(1, 2) == user.put(3, 4) == [FAILED] * 2
    process.start()
    wait_until(lambda: user.put(1) == [THERE])
    assert user.get(1) == [THERE]
    assert user.get(2)[0] in (THERE, ABSENT), "it may have had its checksum, or not"
    tier.close()


def test_stopped_node_delays_no_call_beyond_its_deadline(process: NodeProcess) -> None:
    """Neither requests, nor notices, nor new connections, nor the close."""
    client = NodeClient(process.socket)
    channel, partition = enter(client)
    told = reserve(channel, partition, SOME)
    process.send(signal.SIGSTOP)
    began_s = time.monotonic()
    with pytest.raises(NodeError, match="in time"):
        reserve(channel, partition, SOME, time.monotonic() + 0.02)
    channel.notify(protocol.AbortNotice(partition.number, told.slots))
    notice = protocol.UseNotice(partition.number, keys(*range(4000)))
    for _ in range(200):  # more than the socket takes
        channel.notify(notice)
    with pytest.raises(NodeError, match="in time"):
        Channel(process.socket, client._hello, time.monotonic() + 0.02, lambda _: None)
    assert time.monotonic() - began_s < SLACK_S
    process.send(signal.SIGCONT)
    found = look_up(channel, partition, SOME)
    assert found.places == bytes(3), "the notice has arrived"
    process.send(signal.SIGSTOP)
    client.put_back(channel)
    began_s = time.monotonic()
    client.close()
    assert time.monotonic() - began_s < SLACK_S
    process.send(signal.SIGCONT)


def test_full_backlog_of_a_stopped_node_delays_nobody(process: NodeProcess) -> None:
    process.send(signal.SIGSTOP)
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
        process.send(signal.SIGCONT)


def test_breaker_opens_and_closes_again(process: NodeProcess) -> None:
    """While it is open no call costs a time-out."""
    tier = tier_of(process.socket)
    user = User(tier, timeout_s=0.0)
    patient = User(tier)
    assert patient.put(1) == [THERE]
    process.send(signal.SIGSTOP)
    while tier.breaker is not BreakerState.OPEN:
        assert user.get(1) == [FAILED]
    asked = []
    tier._client._idle_channel = lambda: asked.append(1)  # type: ignore[method-assign]
    assert user.get(1) == [FAILED]
    assert not asked, "nothing is asked"
    del tier._client._idle_channel
    process.send(signal.SIGCONT)
    wait_until(lambda: patient.get(1) == [THERE])
    assert tier.breaker is BreakerState.CLOSED
    tier.close()


def test_notice_tells_the_breaker_nothing(process: NodeProcess) -> None:
    """A stopped node's socket still accepts a notice, so a sent notice is no sign of life."""
    client = NodeClient(process.socket)
    channel, partition = enter(client)
    client.put_back(channel)
    process.send(signal.SIGSTOP)
    for _ in range(3):
        client.note(NodeError("late"))
    assert client.breaker.is_open
    client.tell(
        channel.mapped.instance, protocol.ReleaseNotice(partition.number, protocol.pack([1]))
    )
    assert client.breaker.is_open
    process.send(signal.SIGCONT)
    client.close()


def test_forked_child_uses_nothing_of_its_parent(node: LocalNode) -> None:
    client = NodeClient(node.config.socket)
    channel, partition = enter(client)
    told = reserve(channel, partition, SOME)
    client.put_back(channel)
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(NodeError):
                client.take(soon())
            client.tell(channel.mapped.instance, protocol.AbortNotice(partition.number, told.slots))
            client.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert node.num_used == 3
    client.close()


def test_node_of_another_version_is_refused(node: LocalNode) -> None:
    with bare(node.config.socket) as engine:
        newer = protocol.AttachRequest(1, 99, "new", oldest_version=98)
        assert isinstance(engine.ask(newer), protocol.RefusedAnswer)
        compatible = protocol.AttachRequest(2, 99, "new", oldest_version=protocol.VERSION)
        assert engine.ask(compatible).version == protocol.VERSION


def test_memory_that_was_mapped_is_the_nodes(node: LocalNode) -> None:
    client = NodeClient(node.config.socket)
    channel, partition = enter(client)
    told = reserve(channel, partition, keys(5))
    (slot,) = protocol.unpack(told.slots).tolist()
    mapped = np.frombuffer(channel.mapped.memory.owner, np.uint8)  # type: ignore[call-overload]
    mapped[slot * BLOCK : (slot + 1) * BLOCK] = 7
    own = np.frombuffer(node.node.memory.memory.owner, np.uint8)  # type: ignore[call-overload]
    assert (own[slot * BLOCK : (slot + 1) * BLOCK] == 7).all()
    assert partition.generations[slot] == protocol.unpack(told.generations)[0]
    assert config_of(node.config.socket.parent).host_bytes == channel.mapped.memory.nbytes
    client.put_back(channel)
    client.close()


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
    client = NodeClient(node.config.socket)
    with pytest.raises(NodeError, match="too many files"):
        enter(client)
    channel, partition = enter(client)
    assert len(partition.generations)
    client.put_back(channel)
    client.close()


def test_memory_that_is_shorter_than_the_node_says_is_a_failed_call(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.node.memory, "num_bytes", 2 * node.node.memory.num_bytes)
    client = NodeClient(node.config.socket)
    with pytest.raises(NodeError, match="can't be mapped"):
        client.take(soon())
    client.close()
