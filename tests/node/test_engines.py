"""Slots in use are freed when the engine releases them or has ended, and not earlier."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from kvtier.core.errors import ConfigError
from kvtier.node.config import TenantQuota, parse_tenant_users
from kvtier.node.server import registry
from kvtier.node.wire import protocol
from tests.kit.waiting import wait_until
from tests.node.harness import Bare, LocalNode, bare, keys, local_node
from tests.node.using import UserProcess, using

SOME = keys(1, 2, 3)
RESERVE = "reserve 1 2 3"


def store(engine: Bare, partition: int, some: bytes) -> None:
    told = engine.ask(protocol.ReserveRequest(3, partition, some))
    num = len(protocol.unpack(told.slots))
    engine.send(protocol.CommitNotice(partition, told.slots, protocol.pack(range(num))))


def places(engine: Bare, partition: int, some: bytes) -> list[int]:
    """Return where blocks are; nothing is leased afterwards."""
    found = engine.ask(protocol.LookupRequest(9, partition, some))
    engine.send(protocol.ReleaseNotice(partition, found.slots))
    return list(found.places)


def holder(
    node: LocalNode, *commands: str, client: str = ""
) -> AbstractContextManager[UserProcess]:
    """An engine's process that is killed in the end."""
    return using(node.config.socket, *commands, name="holder", client=client)


# -- the end of a process --------------------------------------------------------------------------


MUCH = 2 * protocol.RECEIVED_AT_ONCE
"""Bytes that the node does not receive by one call."""


def test_connection_closed_with_an_unread_answer_is_noticed(node: LocalNode) -> None:
    """Its process lives on. The event loop reports such an end once, even with unread data."""
    for num_bytes in 8, MUCH:
        engine = Bare(node.config.socket)
        partition = engine.enter()
        engine.send(protocol.LookupRequest(4, partition, keys(4)))
        assert engine.socket.recv(1, socket.MSG_PEEK)
        with node.held_up():
            engine.send(protocol.UseNotice(partition, bytes(num_bytes)))
            engine.close()
        node.until(lambda: not node.server.registry._open)


def test_process_killed_with_an_unread_answer_leaves_nothing(node: LocalNode) -> None:
    with holder(node, RESERVE, "ask 4") as process:
        with node.held_up():
            process.do("notify")
            process.kill()
            process.wait()
        node.until(lambda: not node.server.registry.engines)


@pytest.mark.parametrize("words", [(RESERVE,), (RESERVE, "close")])
def test_killed_writer_leaves_nothing(node: LocalNode, words: tuple[str, ...]) -> None:
    """The writer's connection may have broken before."""
    with holder(node, *words) as process, bare(node.config.socket) as other:
        partition = other.enter()
        assert places(other, partition, SOME) == [protocol.ARRIVING] * 3
        process.kill()
        process.wait()
        wait_until(lambda: places(other, partition, SOME) == [protocol.ABSENT] * 3)
    node.until(lambda: len(node.server.registry.engines) == 1)


def test_killed_reader_leaves_blocks_that_can_be_evicted(node: LocalNode) -> None:
    with bare(node.config.socket) as other:
        partition = other.enter()
        store(other, partition, SOME)
        with holder(node, "lease 1 2 3", "close"):
            node.until(lambda: node.server.registry.engines)
            assert node.num_used == 3
        wait_until(lambda: node.num_used == 0)


@pytest.mark.parametrize("words", [(RESERVE,), (RESERVE, "close")])
def test_stopped_process_keeps_what_it_uses(node: LocalNode, words: tuple[str, ...]) -> None:
    """It may resume and write, so neither time nor a lost connection frees its slots."""
    with holder(node, *words) as process, bare(node.config.socket) as other:
        partition = other.enter()
        process.send_signal(signal.SIGSTOP)
        store(other, partition, keys(*range(10, 120)))
        node.do(lambda: [node.node.poll() for _ in range(100)])
        assert places(other, partition, SOME) == [protocol.ARRIVING] * 3
        assert node.num_used == 3


def test_process_that_lives_in_its_child_keeps_what_it_uses(node: LocalNode) -> None:
    """A forked child has the mapping, too: its socket is open, though its parent is dead."""
    with holder(node, RESERVE, "fork") as process, bare(node.config.socket) as other:
        partition = other.enter()
        process.kill()
        process.wait()
        node.do(lambda: [node.node.poll() for _ in range(100)])
        assert places(other, partition, SOME) == [protocol.ARRIVING] * 3
        assert process.stdin is not None
        process.stdin.close()
        wait_until(lambda: places(other, partition, SOME) == [protocol.ABSENT] * 3)


def test_engine_lives_as_long_as_one_of_its_processes(node: LocalNode) -> None:
    with holder(node, RESERVE) as first, holder(node) as second:
        assert node.num_used == 3
        first.kill()
        first.wait()
        node.until(
            lambda: [len(engine.clients) for engine in node.server.registry.engines.values()] == [1]
        )
        assert node.num_used == 3
        second.kill()
        second.wait()
        wait_until(lambda: node.num_used == 0)


# -- connections -----------------------------------------------------------------------------------


def test_connections_of_one_client_that_broke_cost_one_entry(node: LocalNode) -> None:
    """The node keeps one entry for a process that reconnects for months."""
    num_fds = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with bare(node.config.socket) as engine:
            engine.attach("engine", client="c")
    node.until(lambda: not node.server._connections or _is_idle(node))
    (engine_state,) = node.server.registry.engines.values()
    assert list(engine_state.clients) == ["c"]
    assert len(os.listdir("/proc/self/fd")) < num_fds + 10


def _is_idle(node: LocalNode) -> bool:
    return not any(connection._frames.is_open for connection in node.server._connections)


def test_goodbye_after_a_lost_connection_frees_what_was_left(node: LocalNode) -> None:
    with bare(node.config.socket) as lost:
        partition = lost.enter("engine", client="c")
        lost.ask(protocol.ReserveRequest(3, partition, SOME))
    node.until(lambda: _is_idle(node))
    assert node.num_used == 3
    with bare(node.config.socket) as again:
        again.attach("engine", client="c")
        again.send(protocol.DetachNotice())
        assert again.is_closed()
    assert node.num_used == 0


def test_goodbye_on_one_of_two_connections_ends_nothing(node: LocalNode) -> None:
    with bare(node.config.socket) as first, bare(node.config.socket) as second:
        partition = first.enter("engine", client="c")
        second.attach("engine", client="c")
        first.ask(protocol.ReserveRequest(3, partition, SOME))
        first.send(protocol.DetachNotice())
        assert first.is_closed()
        assert node.num_used == 3
        second.send(protocol.DetachNotice())
        assert second.is_closed()
        assert node.num_used == 0


def test_partition_can_be_named_over_a_later_connection(node: LocalNode) -> None:
    """A notice on a slot may come after a reconnect, on which the partition was not opened."""
    with bare(node.config.socket) as lost:
        partition = lost.enter("engine", client="c")
        told = lost.ask(protocol.ReserveRequest(3, partition, SOME))
    with bare(node.config.socket) as again:
        again.attach("engine", client="c")
        again.send(protocol.CommitNotice(partition, told.slots, protocol.pack([0, 1, 2])))
        assert places(again, partition, SOME) == [protocol.MEMORY] * 3
        again.send(protocol.DetachNotice())
        assert again.is_closed()


def test_answer_that_was_never_read_leaves_no_lease(node: LocalNode) -> None:
    """Leases of answers that the node could not send are released, though the process lives."""
    with bare(node.config.socket) as engine:
        partition = engine.enter("engine", client="c")
        store(engine, partition, keys(*range(32)))
        num = 0
        engine.socket.setblocking(False)
        frame = protocol.frame(protocol.LookupRequest(3, partition, keys(*range(32))))
        while num < 20_000:
            try:
                engine.socket.send(frame)
            except BlockingIOError:
                break
            num += 1
        engine.socket.settimeout(30)
        engine.socket.shutdown(socket.SHUT_RDWR)  # what has arrived can still be read
        sizes = []
        node.until(lambda: _is_idle(node))
        while (answer := engine.receive()) is not None:
            assert isinstance(answer, protocol.LookupAnswer)
            sizes.append(len(answer.slots) // 8)
        (state,) = node.server.registry.engines.values()
        leased = node.do(
            lambda: sum(int(held.num_leases.sum()) for held in state.partitions.values())
        )
        assert leased == sum(sizes), "what was told of, and nothing else"
        assert len(sizes) < num


def test_notices_before_the_end_of_a_connection_count(node: LocalNode) -> None:
    """They count even if the process reads no more answers."""
    with bare(node.config.socket) as engine:
        partition = engine.enter("engine", client="c")
        told = engine.ask(protocol.ReserveRequest(3, partition, SOME))
        lookups = [protocol.LookupRequest(3, partition, keys(*range(2000)))] * 20
        engine.send(*lookups, protocol.AbortNotice(partition, told.slots))
    node.until(lambda: _is_idle(node))
    assert node.num_used == 0


def test_notices_after_a_message_that_failed_count(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the node's own leaves no slot in use."""

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    with bare(node.config.socket) as engine:
        partition = engine.enter("engine", client="c")
        told = engine.ask(protocol.ReserveRequest(3, partition, SOME))
        monkeypatch.setattr("kvtier.node.server.engines.Holdings.serve", fail)
        lookup = protocol.LookupRequest(4, partition, SOME)
        engine.send(lookup, protocol.AbortNotice(partition, told.slots), lookup)
        assert engine.is_closed()
        wait_until(lambda: node.num_used == 0)


def test_connection_that_never_attaches_is_closed(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.node.server.connection.HELLO_S", 0.05)
    with bare(node.config.socket) as silent, bare(node.config.socket) as good:
        good.attach()
        assert silent.is_closed()
        assert good.open().partition == 0


def test_connections_of_a_process_are_bounded(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_CONNECTIONS", 3)
    connections = [Bare(node.config.socket) for _ in range(3)]
    for connection in connections:
        assert isinstance(connection.attach(), protocol.AttachAnswer)
    with bare(node.config.socket) as fourth:
        assert fourth.is_closed()
    connections.pop().close()
    node.until(lambda: node.server.registry._open.total() == 2)
    with bare(node.config.socket) as fourth:
        assert isinstance(fourth.attach(), protocol.AttachAnswer)
    for connection in connections:
        connection.close()


def test_clients_that_a_process_left_without_a_goodbye_are_bounded(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each such client costs the node a descriptor until the process ends."""
    monkeypatch.setattr(registry, "MAX_CLIENTS", 4)
    with holder(node):
        for number in range(4):
            with bare(node.config.socket) as left:
                assert isinstance(left.attach(f"engine {number}"), protocol.AttachAnswer)
        with bare(node.config.socket) as fifth:
            assert isinstance(fifth.attach("engine 5"), protocol.RefusedAnswer)
    with bare(node.config.socket) as known:
        node.do(lambda: None)
        assert isinstance(known.attach("engine 6"), protocol.RefusedAnswer)


def test_reader_hears_of_a_writers_commit_at_once(node: LocalNode) -> None:
    """It waits for what it needs, and is not woken by anything else."""
    with bare(node.config.socket) as writer, bare(node.config.socket) as reader:
        partition = writer.enter("writer")
        reader.enter("reader")
        told = writer.ask(protocol.ReserveRequest(3, partition, SOME))
        reader.send(protocol.FetchRequest(4, partition, SOME, 600.0))
        node.until(lambda: node.server.registry._waits)
        for _ in range(3):
            node.do(node.server.registry.changed)
        (wait,) = node.server.registry._waits
        assert not wait.signal.is_set()
        writer.send(protocol.CommitNotice(partition, told.slots, protocol.pack([0, 1, 2])))
        found = reader.receive()
        assert isinstance(found, protocol.FetchAnswer)
        assert found.slots == told.slots
        assert not node.server.registry._waits


def test_wait_of_a_lost_connection_is_forgotten(node: LocalNode) -> None:
    with bare(node.config.socket) as writer:
        partition = writer.enter("writer")
        writer.ask(protocol.ReserveRequest(3, partition, SOME))
        with bare(node.config.socket) as reader:
            reader.enter("reader")
            reader.send(protocol.FetchRequest(4, partition, SOME, 600.0))
            node.until(lambda: node.server.registry._waits)
        node.until(lambda: not node.server.registry._waits)


def test_requests_that_wait_are_bounded(node: LocalNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.node.server.connection.MAX_WAITING", 10)
    with bare(node.config.socket) as writer, bare(node.config.socket) as reader:
        partition = writer.enter("writer")
        writer.ask(protocol.ReserveRequest(3, partition, SOME))
        reader.enter("reader")
        reader.send(*[protocol.FetchRequest(4, partition, SOME, 600.0)] * 11)
        assert reader.is_closed()
        node.until(lambda: not node.server.registry._waits)


def test_node_without_descriptors_serves_on(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that cannot be accepted now is accepted later; others are not affected."""
    with bare(node.config.socket) as good:
        good.attach()
        listener, tries = node.server._socket, []

        class Full:
            def accept(self) -> Any:
                tries.append(1)
                if len(tries) < 3:
                    raise OSError(24, "Too many open files")
                return listener.accept()

            def __getattr__(self, name: str) -> Any:
                return getattr(listener, name)

        monkeypatch.setattr(node.server, "_socket", Full())
        with bare(node.config.socket) as late:
            assert good.open().partition == 0
            assert isinstance(late.attach(), protocol.AttachAnswer)
        assert len(tries) < 10, "it does not try without end"
        monkeypatch.undo()


# -- who may attach --------------------------------------------------------------------------------


def test_socket_and_memory_are_for_this_user(node: LocalNode) -> None:
    config = node.config
    assert config.socket.stat().st_mode & 0o777 == 0o660
    assert config.directory.stat().st_mode & 0o077 == 0
    assert (config.directory / "memory").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("tenant", ["../../etc", "a/b", "x" * 65, "ten ant", "."])
def test_tenant_that_is_no_name_is_refused(node: LocalNode, tenant: str) -> None:
    with bare(node.config.socket) as engine:
        assert isinstance(engine.attach(tenant=tenant), protocol.RefusedAnswer)


ATTACH = """
import os, sys
from pathlib import Path
from tempfile import TemporaryDirectory
from tests.node.harness import Bare
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
for tenant in ["", "a", "b", "c"]:
    print(type(Bare(Path(sys.argv[1])).attach(tenant=tenant)).__name__, flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_user_names_only_tenants_that_it_was_given() -> None:
    quotas = {"b": TenantQuota()}
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with local_node(Path(folder), tenant_users={"a": [65534], "b": [1]}, quotas=quotas) as node:
            node.config.socket.chmod(0o666)

            def attach(uid: int) -> list[str]:
                done = subprocess.run(
                    [sys.executable, "-c", ATTACH, str(node.config.socket), str(uid)],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                return done.stdout.split()

            good, bad = "AttachAnswer", "RefusedAnswer"
            assert attach(65534) == [good, good, bad, bad]
            assert attach(0) == [good] * 4


def test_users_of_tenants_as_text() -> None:
    assert parse_tenant_users(["a=1000,1001", "b=7"]) == {"a": {1000, 1001}, "b": {7}}
    for wrong in ["a", "a=", "a=x", "a=1,,2", "a/b=1", "a=-1"]:
        with pytest.raises(ConfigError):
            parse_tenant_users([wrong])
    with pytest.raises(ConfigError):
        parse_tenant_users(["a=1", "a=2"])


def test_default_tenant_can_be_given_to_some(tmp_path: Path) -> None:
    with local_node(tmp_path, tenant_users={"default": [7]}) as node:
        config = node.config
        assert config.admits("default", 7)
        assert not config.admits("default", 8)
        assert config.admits("default", os.geteuid())
        assert not config.admits("other", 7)


def test_engine_of_another_user_is_another_engine(node: LocalNode) -> None:
    """No engine takes over, or blocks, the name of another user's or tenant's engine."""
    with bare(node.config.socket) as first, bare(node.config.socket) as second:
        first.attach("engine", "a")
        second.attach("engine", "b")
        assert len(node.server.registry.engines) == 2


def test_client_of_another_process_is_refused(node: LocalNode) -> None:
    with holder(node, client="c"), bare(node.config.socket) as other:
        assert isinstance(other.attach("holder", client="c"), protocol.RefusedAnswer)
