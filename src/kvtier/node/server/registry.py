"""Engines of a node by name, and who may attach.

A client that was closed without a goodbye is kept until its process has ended, which the kernel
reports.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvtier.core.errors import ConfigError, printable
from kvtier.node.config import DEFAULT_TENANT, check_tenant
from kvtier.node.server.engines import AttachedClient, AttachedEngine, AttachError, EngineProcess
from kvtier.node.server.lookups import TimeCounts
from kvtier.node.server.node import CacheNode
from kvtier.node.server.opening import PartitionOpener
from kvtier.node.wire.frame_socket import FrameSocket
from kvtier.node.wire.protocol import AttachRequest
from kvtier.plan.decide import Awaited

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.05
"""Longest time between two looks at whether something has ended."""
MAX_CONNECTIONS = 64
"""Most open connections of one process."""
MAX_CLIENTS = 64
"""Most clients of one process, with those that were closed without a goodbye."""
MAX_NAME_CHARS = 256

EngineKey = tuple[int, str, str]


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """A request that waits. signal: set when all that it waits for is over."""

    awaited: Sequence[Awaited]
    signal: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        return all(each.is_over for each in self.awaited)


class Registry:
    """Engines by name, and the changes that requests wait for.

    node: the node. Owned by the event loop's thread.

    Attributes:
        opener: opens partitions.
        engines: by user, tenant and name, so a user cannot use, or occupy, another user's name.
        lookups: times of look-ups.
        wake: called when a request waits for something that only a poll can notice.
    """

    def __init__(self, node: CacheNode) -> None:
        self.node = node
        self.opener = PartitionOpener(node)
        self.engines: dict[EngineKey, AttachedEngine] = {}
        self._num_connections = 0
        self._open: Counter[tuple[int, int]] = Counter()  # connections by process
        self._num_clients: Counter[tuple[int, int]] = Counter()  # by process
        self._waits: set[_Wait] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.lookups = TimeCounts()
        self.wake: Callable[[], object] = lambda: None

    # -- connections -------------------------------------------------------------------------------

    def enter(self, process: EngineProcess) -> None:
        """Count a new connection. Raises ``AttachError`` if the process has too many."""
        if self._open[process.identity] >= MAX_CONNECTIONS:
            raise AttachError(f"process {process.pid} has {MAX_CONNECTIONS} connections already")
        self._open[process.identity] += 1

    def leave(self, process: EngineProcess) -> None:
        """Count a connection that was closed."""
        self._open[process.identity] -= 1
        if not self._open[process.identity]:
            del self._open[process.identity]

    def attach(
        self, hello: AttachRequest, process: EngineProcess, connection: FrameSocket
    ) -> tuple[int, str, AttachedEngine]:
        """Return the number of a new connection, its client and its engine.

        Raises ``AttachError`` if the process may not attach.
        """
        tenant = hello.tenant or DEFAULT_TENANT
        try:
            check_tenant(tenant)
        except ConfigError as error:
            raise AttachError(str(error)) from None
        if not 0 < len(hello.engine) <= MAX_NAME_CHARS:
            raise AttachError(f"the engine's name has {len(hello.engine)} letters")
        if not self.node.config.admits(tenant, process.uid):
            raise AttachError(
                f"user {process.uid} may not name tenant {tenant!r}; list it in --tenant-users"
            )
        key = (process.uid, tenant, hello.engine)
        users = self.node.memory.records.users
        engine = self.engines.get(key)
        if engine is None or not engine.clients:  # one without clients is about to end
            engine = AttachedEngine(hello.engine, process.uid, tenant, users.enter(hello.engine))
        number = self._num_connections = self._num_connections + 1
        name = hello.client or f"#{number}"
        client = engine.clients.get(name)
        if client is not None and client.process.identity != process.identity:
            raise AttachError(f"client {name[:64]!r} belongs to process {client.process.pid}")
        if client is None:
            if self._num_clients[process.identity] >= MAX_CLIENTS or len(name) > MAX_NAME_CHARS:
                raise AttachError(f"process {process.pid} has {MAX_CLIENTS} clients already")
            try:
                client = AttachedClient(process.copy(), users.add_client(engine.user, process.pid))
            except OSError as error:
                raise AttachError(f"no memory for another client: {error.strerror}") from error
            engine.clients[name] = client
            self._num_clients[process.identity] += 1
            loop = asyncio.get_running_loop()
            loop.add_reader(client.process.pidfd, self._on_dead, name, engine)
        client.connections[number] = connection
        client.has_left = False
        self.engines[key] = engine
        engine.title = printable(hello.title[:MAX_NAME_CHARS]) or engine.title
        return number, name, engine

    def detach(
        self, number: int, name: str, engine: AttachedEngine, is_goodbye: bool = False
    ) -> None:
        """Note that a connection was closed.

        is_goodbye: whether its client uses no slot, if this was its last connection.
        """
        client = engine.clients[name]
        del client.connections[number]
        others = client.connections.values()
        if is_goodbye and all(other.is_ended for other in others):
            client.has_left = True
            for other in others:  # they were lost before, and that was not noticed yet
                other.read_on()
        if not others and (client.has_left or client.process.has_ended):
            self._end(name, engine)

    def _on_dead(self, name: str, engine: AttachedEngine) -> None:
        """Notice that the process of a client is dead. A child of it may hold its connections."""
        client = engine.clients[name]
        asyncio.get_running_loop().remove_reader(client.process.pidfd)
        if not client.connections:
            self._end(name, engine)
        for connection in list(client.connections.values()):
            connection.read_on()

    def _end(self, name: str, engine: AttachedEngine) -> None:
        """Forget a client that uses no slot; and its engine with the last one."""
        client = engine.clients.pop(name)
        process = client.process
        asyncio.get_running_loop().remove_reader(process.pidfd)
        process.close()
        self._num_clients[process.identity] -= 1
        if not self._num_clients[process.identity]:
            del self._num_clients[process.identity]
        if engine.clients:
            self.node.memory.records.users.remove_client(engine.user, client.number)
            return
        if engine.num_slots:
            logger.info("engine ended name=%s slots=%d", engine.name, engine.num_slots)
        ending = asyncio.get_running_loop().create_task(self._take_back(engine, client.number))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _take_back(self, engine: AttachedEngine, client: int) -> None:
        """Take back the slots of an engine that has ended. client: number of its last client."""
        for _ in engine.end():
            await asyncio.sleep(0)
        self.node.memory.records.users.remove_client(engine.user, client)
        key = (engine.uid, engine.tenant, engine.name)
        if self.engines.get(key) is engine:
            del self.engines[key]

    def close(self) -> None:
        """Forget all clients, at the end of the node."""
        for ending in self._endings:
            ending.cancel()
        loop = asyncio.get_running_loop()
        for engine in self.engines.values():
            for client in engine.clients.values():
                loop.remove_reader(client.process.pidfd)
                client.process.close()
        self.engines.clear()

    # -- changes -----------------------------------------------------------------------------------

    def wake_all(self) -> None:
        """Poll every partition soon, since any of them may have been changed."""
        self.node.poll_all()
        self.wake()

    def note_writes(self) -> None:
        """Note that an engine has written blocks, for which others may wait."""
        if self._waits:
            self.wake()

    def changed(self) -> None:
        """Let requests that wait look again. Costs one look at what each of them waits for."""
        self._changed.set()
        self._changed = asyncio.Event()
        for wait in [wait for wait in self._waits if wait.is_over]:
            self._waits.remove(wait)
            wait.signal.set()

    async def all_over(self, awaited: Sequence[Awaited], until_s: float) -> bool:
        """Wait until all are over. Return whether they are, in time."""
        wait = _Wait(awaited)
        left_s = until_s - time.monotonic()
        if wait.is_over or left_s <= 0:
            return wait.is_over
        self._waits.add(wait)
        self.wake()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await wait.signal.wait()
        finally:
            self._waits.discard(wait)
        return wait.is_over

    async def wait(self, until_s: float) -> bool:
        """Wait for a change; return whether there is time left."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, LOOK_AGAIN_S)):
                await self._changed.wait()
        return True
