"""Start of a node: other nodes, leftovers and too little memory, in one sentence each."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.core.errors import ConfigError
from kvtier.devices.cpu import CpuDevice
from kvtier.node.config import SHARED_MEMORY
from kvtier.node.server.memory import LockFile, NodeMemory
from kvtier.node.server.node import CacheNode
from kvtier.node.server.server import NodeServer, listen
from kvtier.tools.cli import app
from tests.kit.nodes import running
from tests.kit.waiting import wait_until
from tests.node.harness import PATIENCE_S, LocalNode, bare, config_of, local_node, node_process


def test_socket_of_a_live_node_is_left_alone(tmp_path: Path) -> None:
    """The node may be stopped and resume later, so its socket stays."""
    with node_process(tmp_path) as first:
        other = CacheNode(config_of(tmp_path / "other"), CpuDevice())
        first.pause()
        with pytest.raises(ConfigError, match="another node listens at"):
            NodeServer(other, first.socket)
        first.resume()
        with bare(first.socket) as engine:
            assert engine.attach().instance
        other.close()


def test_memory_of_a_live_node_is_left_alone(tmp_path: Path) -> None:
    with local_node(tmp_path) as node:
        with pytest.raises(ConfigError, match="another node uses"):
            CacheNode(node.config, CpuDevice())
        with bare(node.config.socket) as engine:
            assert engine.attach().instance


def test_leftovers_of_a_killed_node_are_replaced(tmp_path: Path) -> None:
    with node_process(tmp_path) as node:
        node.kill()
        left = tmp_path / "memory" / "memory"
        assert node.socket.exists()
        assert left.exists()
        inode = left.stat().st_ino
        node.start()
        assert left.stat().st_ino != inode or left.stat().st_nlink == 1
        with bare(node.socket) as engine:
            assert engine.attach().instance
        assert node.stop() == 0
        assert not node.socket.exists()
        assert not left.exists()


def test_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("notes")
    with pytest.raises(ConfigError, match="is no socket"):
        listen(path)
    assert path.read_text() == "notes"


def test_socket_can_be_made_again_after_a_failure(tmp_path: Path) -> None:
    node = CacheNode(config_of(tmp_path), CpuDevice())
    path = tmp_path / "there" / "node.sock"
    server = NodeServer(node, path)
    with pytest.raises(ConfigError, match="another node"):
        NodeServer(node, path)
    server.close()
    NodeServer(node, path).close()
    assert not path.exists()
    node.close()


def test_full_shared_memory_is_one_sentence() -> None:
    """The arena is allocated at the start: an engine never meets a page that is not there."""
    found = os.statvfs(SHARED_MEMORY)
    directory = SHARED_MEMORY / f"kvtier-test-{os.getpid()}"
    too_much = found.f_blocks * found.f_frsize + (1 << 30)
    try:
        with pytest.raises(ConfigError, match="No space left on device; lower host capacity"):
            NodeMemory(directory, too_much, 1 << 30, CpuDevice())
        assert not (directory / "memory").exists()
        NodeMemory(directory, 1 << 20, 1 << 20, CpuDevice()).close()
    finally:
        assert not directory.exists()


def test_node_that_ends_leaves_nothing(tmp_path: Path) -> None:
    node = LocalNode(config_of(tmp_path))
    with bare(node.config.socket) as engine:
        engine.enter()
        assert list(tmp_path.iterdir())
    node.close()
    assert not list(tmp_path.iterdir())


def test_lock_that_was_released_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock's file was removed, so a lock on it would exclude no process."""
    path, lock = tmp_path / "lock", fcntl.flock
    first = LockFile(path)
    with pytest.raises(BlockingIOError):
        LockFile(path)

    def release_first(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.release()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", release_first)
    second = LockFile(path)
    with pytest.raises(BlockingIOError):
        LockFile(path)
    second.release()
    assert not path.exists()


@pytest.mark.parametrize("num_bytes", [100, 107, 108, 200])
def test_long_socket_is_refused_before_anything_is_made(tmp_path: Path, num_bytes: int) -> None:
    """The control socket beside it has a longer name, and is refused as well."""
    folder = tmp_path / "there"
    path = folder / ("s" * (num_bytes - len(str(folder)) - 1))
    command = ["node", "run", "--socket", str(path), f"--memory-path={tmp_path / 'memory'}"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "that of a Unix socket at most 107; name a shorter one" in done.stderr
    assert not list(tmp_path.iterdir())


def test_longest_socket_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / ("s" * (107 - len(".control") - len(str(tmp_path)) - 1))
    config = config_of(tmp_path, socket=path)
    assert len(str(config.control_socket)) == 107
    node = CacheNode(config, CpuDevice())
    NodeServer(node, path).close()
    node.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_node_ends_in_order_by_each_signal(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path) as node:
        assert (tmp_path / "memory").exists()
        assert node.stop(number) == 0, node.log
    assert {each.name for each in tmp_path.iterdir()} == {"log"}


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_directory_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "memory"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigError, match="others may write"):
        NodeMemory(directory, 1 << 20, 1 << 20, CpuDevice())


def test_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    """Another user may have created the link, since the name is known."""
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "memory").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="no directory of this user"):
        NodeMemory(tmp_path / "memory", 1 << 20, 1 << 20, CpuDevice())
    assert not list((tmp_path / "elsewhere").iterdir())


def test_listener_of_another_program_has_no_lock(tmp_path: Path) -> None:
    """The control socket is made without one, and a stale file is replaced."""
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    made = listen(path)
    assert path.stat().st_mode & 0o777 == 0o660
    made.close()


@pytest.mark.parametrize("turns", range(6))
def test_server_ends_although_it_was_woken_just_before(tmp_path: Path, turns: int) -> None:
    """turns: of the event loop between both."""
    node = LocalNode(config_of(tmp_path))
    wait_until(lambda: node._task)

    def cancel(left: int) -> None:
        if left:
            node._loop.call_soon(cancel, left - 1)
        elif node._task is not None:
            node._task.cancel()

    def wake_and_cancel() -> None:
        node.server.registry.wake()
        cancel(turns)

    node._loop.call_soon_threadsafe(wake_and_cancel)
    node._thread.join(PATIENCE_S)
    assert not node._thread.is_alive()
    node.node.close()
