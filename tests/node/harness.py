"""Nodes for tests, in a thread or in a process of their own; and bare connections."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import uvloop

from kvtier.devices.cpu import CpuDevice
from kvtier.node.client.cache import NodeCache
from kvtier.node.client.channel import NodeClient
from kvtier.node.config import NodeConfig
from kvtier.node.server.node import CacheNode
from kvtier.node.server.partition import Partition
from kvtier.node.server.partition_key import PartitionKey
from kvtier.node.server.server import NodeServer
from kvtier.node.wire import protocol
from kvtier.node.wire.protocol import FromNode, Message, Request
from tests.kit.nodes import NodeProcess, running
from tests.kit.waiting import wait_until

T = TypeVar("T")
PATIENCE_S = 30.0
SEGMENT = 64 << 10
BLOCK = 16 << 10
SCOPE = b"s" * 32


def config_of(folder: Path, **options: Any) -> NodeConfig:
    """Return the configuration of a node with 16 segments of four 16 KiB blocks."""
    usual = {"host_capacity": "1MiB", "segment_capacity": "64KiB", "socket": folder / "node.sock"}
    return NodeConfig(memory_path=folder / "memory", **{**usual, **options})


class LocalNode:
    """A node that serves on a thread of this process."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.node = CacheNode(config, CpuDevice())
        self.server = NodeServer(self.node, config.socket)
        self._loop = uvloop.new_event_loop()  # as ``run_node`` does
        self._task: asyncio.Task[None] | None = None
        self._thread = Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        async def serve() -> None:
            self._task = asyncio.current_task()
            with suppress(asyncio.CancelledError):
                await self.server.serve()

        self._loop.run_until_complete(serve())
        self._loop.close()

    def do(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns on the node's own thread."""

        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_S)

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Hold up the node's own thread meanwhile, as a busy machine does."""
        is_held, ends = Event(), Event()

        def wait() -> None:
            is_held.set()
            ends.wait(PATIENCE_S)

        self._loop.call_soon_threadsafe(wait)
        assert is_held.wait(PATIENCE_S)
        try:
            yield
        finally:
            ends.set()

    def until(self, condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
        """Wait until a condition holds on the node's own thread."""
        wait_until(lambda: self.do(condition), patience_s=patience_s)

    @property
    def num_used(self) -> int:
        """Number of slots that engines use."""
        return self.do(
            lambda: sum(engine.num_slots for engine in self.server.registry.engines.values())
        )

    def check(self) -> None:
        self.do(self.node.check_invariants)

    def close(self) -> None:
        if self._thread.is_alive():
            assert self._task is not None
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join()
            self.node.close()


def opened(node: CacheNode, key: PartitionKey) -> tuple[int, Partition]:
    """Return the number of a partition, and it; open it at its first use, on this thread."""
    key = node.check_key(key)
    number = node.number_of(key)
    if number is not None:
        return number, node.partitions[number]
    return node.enter(key, node.open_storages(key))


@contextmanager
def local_node(folder: Path, **options: Any) -> Iterator[LocalNode]:
    node = LocalNode(config_of(folder, **options))
    try:
        yield node
        node.check()
    finally:
        node.close()


@contextmanager
def node_process(folder: Path, *options: str) -> Iterator[NodeProcess]:
    """Run a node of the size of ``config_of`` in a process of its own."""
    sizes = ("--host-capacity=1MiB", "--segment-capacity=64KiB")
    with running(folder, *sizes, *options) as node:
        yield node


def node_cache(
    socket: Path,
    scope: bytes = SCOPE,
    block_bytes: int = BLOCK,
    deadline_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
    group_bytes: int = 0,
) -> NodeCache:
    """Return the cache of an engine, for keys of 36 bytes, whose partition is open."""
    client = NodeClient(socket)
    cache = NodeCache(client, lambda: scope, block_bytes, deadline_s, clock, group_bytes)
    probe = [b"probe".ljust(36)]
    wait_until(lambda: cache.reserve(probe) is not None)
    cache.abort(probe)
    return cache


class Bare:
    """A connection that sends any message, valid or not."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        try:
            self.socket.connect(str(path))
        except OSError:
            self.socket.close()
            raise
        self.fds: list[int] = []
        self._frames = protocol.Frames()
        self._ready: list[FromNode] = []

    def send(self, *messages: Message) -> None:
        self.socket.sendall(b"".join(map(protocol.frame, messages)))

    def receive(self) -> FromNode | None:
        """Return the next message; None if the node has closed the connection."""
        while not self._ready:
            try:
                num, fds = protocol.receive(self.socket, self._frames)
            except ConnectionResetError:
                return None
            if not num:
                return None
            self.fds += fds
            while (content := self._frames.next()) is not None:
                self._ready.append(protocol.decode_node(content))
        return self._ready.pop(0)

    def ask(self, message: Request) -> Any:
        """Return the answer to a request; None if the node has closed the connection."""
        self.send(message)
        while (answer := self.receive()) is not None:
            if getattr(answer, "id", None) == message.id:
                break
        return answer

    def attach(self, engine: str = "bare", tenant: str = "", client: str = "") -> Any:
        return self.ask(protocol.AttachRequest(1, protocol.VERSION, engine, tenant, client=client))

    def open(self, block_bytes: int = BLOCK, key_bytes: int = 8, scope: bytes = SCOPE) -> Any:
        return self.ask(protocol.OpenRequest(2, scope, block_bytes, key_bytes))

    def enter(self, engine: str = "bare", tenant: str = "", client: str = "") -> int:
        """Attach, and open a partition. Return its number."""
        self.attach(engine, tenant, client)
        return int(self.open().partition)

    def is_closed(self) -> bool:
        """Whether the node closes the connection, after what it has sent."""
        while (answer := self.receive()) is not None:
            del answer
        return True

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self.socket.close()


@contextmanager
def bare(path: Path) -> Iterator[Bare]:
    connection = Bare(path)
    try:
        yield connection
    finally:
        connection.close()


def keys(*numbers: int) -> bytes:
    """Return concatenated keys of eight bytes."""
    return b"".join(number.to_bytes(8, "little") for number in numbers)
