"""Client of a node: requests with deadlines over a Unix socket, and the node's memory mapped.

An engine never waits for the node. Each request has a deadline; after some failures in a row a
breaker refuses requests for a while. A client reconnects by itself, also to a node that has new
memory.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TypeVar
from uuid import uuid4

import numpy as np

from kvtier.devices.base import Memory
from kvtier.errors import CacheError
from kvtier.node import protocol
from kvtier.node.guard import RoomFacts
from kvtier.node.protocol import FromEngine, FromNode, Int64s
from kvtier.system.process import OwnerProcess
from kvtier.tiers.breaker import Breaker

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

FAILURES_UNTIL_OPEN = 3
RECEIVED_AT_ONCE = 1 << 20
MOST_FDS = 2


class NodeError(CacheError):
    """The node is not there, did not answer in time, or refused the request."""


@dataclass(frozen=True, slots=True, eq=False)
class MappedMemory:
    """Memory of a node in this process.

    instance: name of the memory; a node that was started anew has another one. memory: the arena.
    segment_bytes: no copy may cross a multiple of it. storages: the node's storage tiers, fastest
    first.
    """

    instance: str
    memory: Memory
    segment_bytes: int
    storages: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class OpenedRoom:
    """A room of a node, as one connection knows it.

    number: of the room in messages. generations: int64 [num_slots], shared with the node.
    """

    number: int
    mapped: MappedMemory
    generations: Int64s


class Channel:
    """One connection, used by one thread at a time.

    Args:
        path: of the socket.
        engine, tenant: see ``AttachRequest``.
        until_s: deadline, by ``time.monotonic``.
        maps: memories that this process has mapped, by instance.

    Raises:
        NodeError: the node is not there, not in time, or refuses.
    """

    def __init__(
        self, path: Path, engine: str, tenant: str, until_s: float, maps: dict[str, MappedMemory]
    ) -> None:
        self._frames = protocol.Frames()
        self._ready: list[FromNode] = []
        self._fds: list[int] = []
        self._num_requests = 0
        self._rooms: dict[RoomFacts, OpenedRoom] = {}
        self._owner: dict[int, int] = {}  # requests that were given up: id -> room
        self.ended: set[int] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._set_deadline(until_s)
            self._socket.connect(str(path))
            welcome = self.request(
                lambda number: protocol.AttachRequest(number, protocol.VERSION, engine, tenant),
                protocol.AttachAnswer,
                until_s,
            )
        except OSError as error:
            self.close()
            raise NodeError(f"{path}: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise
        fd = self._fds.pop()
        self.mapped = maps.get(welcome.instance) or _map(fd, welcome)
        os.close(fd)
        maps.setdefault(welcome.instance, self.mapped)

    def has_room(self, facts: RoomFacts) -> bool:
        """Whether a room was opened on this connection."""
        return facts in self._rooms

    def room(self, facts: RoomFacts, until_s: float) -> OpenedRoom:
        """Return a room; open it at its first use."""
        room = self._rooms.get(facts)
        if room is None:
            opened = self.request(
                lambda number: protocol.OpenRequest(
                    number, facts.scope, facts.block_bytes, facts.key_bytes
                ),
                protocol.OpenAnswer,
                until_s,
            )
            fd = self._fds.pop()
            size = max(8 * opened.num_slots, mmap.PAGESIZE)
            generations = np.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ), "<i8")
            os.close(fd)
            room = OpenedRoom(opened.room, self.mapped, generations[: opened.num_slots])
            self._rooms[facts] = room
        return room

    def request(
        self, make: Callable[[int], FromEngine], kind: type[Answer], until_s: float
    ) -> Answer:
        """Send the message that ``make`` returns for a request number. Return its answer.

        Raises:
            NodeError: the node refuses, or does not answer in time. An answer that comes
                later is undone.
        """
        self._num_requests += 1
        number = self._num_requests
        message = make(number)
        self.notify(message, until_s)
        while True:
            answer = self._receive(until_s, message)
            if getattr(answer, "id", None) != number:
                self._undo(answer)
                continue
            if isinstance(answer, protocol.RefusedAnswer):
                raise NodeError(answer.reason)
            if not isinstance(answer, kind):
                raise NodeError(f"the node answered with {type(answer).__name__}")
            return answer

    def notify(self, message: FromEngine, until_s: float) -> None:
        """Send a message without an answer."""
        try:
            self._set_deadline(until_s)
            self._socket.sendall(protocol.frame(message))
        except TimeoutError:  # a part may have been sent: the connection can't be used any more
            self.close()
            raise NodeError("the node takes no requests in time") from None
        except OSError as error:
            self.close()
            raise NodeError(f"the connection is lost: {error.strerror or error}") from None

    def hear(self) -> None:
        """Take in what the node has sent, without waiting."""
        with suppress(NodeError):
            while True:
                self._undo(self._receive(0.0, None))

    @property
    def is_open(self) -> bool:
        """Whether the connection can be used."""
        return self._socket.fileno() >= 0

    def close(self) -> None:
        """Close the connection. The node keeps what this process uses until it has ended."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._socket.close()

    # -- bytes -------------------------------------------------------------------------------------

    def _set_deadline(self, until_s: float) -> None:
        left_s = until_s - time.monotonic()
        self._socket.settimeout(max(left_s, 0.0))

    def _receive(self, until_s: float, waiting: FromEngine | None) -> FromNode:
        """Return the node's next message. waiting: the request that is given up on a time-out."""
        while not self._ready:
            try:
                self._set_deadline(until_s)
                received, fds, _, _ = socket.recv_fds(self._socket, RECEIVED_AT_ONCE, MOST_FDS)
            except (TimeoutError, BlockingIOError):
                room = getattr(waiting, "room", None)
                if waiting is not None and room is not None:
                    self._owner[waiting.id] = room  # type: ignore[union-attr]
                raise NodeError("the node did not answer in time") from None
            except OSError as error:
                self.close()
                raise NodeError(f"the connection is lost: {error.strerror}") from None
            if not received:
                self.close()
                raise NodeError("the node closed the connection")
            self._fds += fds
            try:
                self._ready += map(protocol.decode_node, self._frames.take(received))
            except protocol.ProtocolError as error:
                self.close()
                raise NodeError(str(error)) from None
        return self._ready.pop(0)

    def _undo(self, answer: FromNode) -> None:
        """Give back the slots of an answer that came too late."""
        if isinstance(answer, protocol.EndedNotice):
            self.ended.add(answer.watch)
            return
        room = self._owner.pop(getattr(answer, "id", 0), None)
        until_s = time.monotonic() + 1.0
        if room is None:
            return
        if isinstance(answer, protocol.LookupAnswer | protocol.FetchAnswer):
            slots = protocol.unpack(answer.slots)
            self.notify(protocol.ReleaseNotice(room, protocol.pack(slots[slots >= 0])), until_s)
        elif isinstance(answer, protocol.ReserveAnswer):
            self.notify(protocol.AbortNotice(room, answer.slots), until_s)


def _map(fd: int, welcome: protocol.AttachAnswer) -> MappedMemory:
    mapped = mmap.mmap(fd, welcome.memory_bytes, flags=mmap.MAP_SHARED)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    memory = Memory(address, welcome.memory_bytes, "host", mapped)
    return MappedMemory(welcome.instance, memory, welcome.segment_bytes, welcome.storages)


class NodeClient:
    """Connections of one process to a node. Any thread may use it.

    Args:
        path: of the node's socket.
        tenant: see ``AttachRequest``.
        engine: name of the engine, the same in all of its processes; a new one by default.
    """

    def __init__(self, path: Path, tenant: str = "", engine: str = "") -> None:
        self.path = path
        self.tenant = tenant
        self.engine = engine or uuid4().hex
        self.breaker = Breaker(time.monotonic, FAILURES_UNTIL_OPEN)
        self.last_error = ""
        self._lock = Lock()
        self._idle: list[Channel] = []
        self._maps: dict[str, MappedMemory] = {}
        self._process = OwnerProcess()
        self._is_closed = False

    def take(self, until_s: float) -> Channel:
        """Return a connection for this thread alone; ``put_back`` ends its use.

        Raises:
            NodeError: there is none in time.
        """
        if not self._process.is_here or self._is_closed:
            raise NodeError("the client is closed, or belongs to another process")
        if not self.breaker.enter():
            raise NodeError(f"the node is left alone for a while: {self.last_error}")
        with self._lock:
            channel = self._idle.pop() if self._idle else None
        try:
            if channel is None:
                channel = Channel(self.path, self.engine, self.tenant, until_s, self._maps)
        except NodeError as error:
            self.note(error)
            raise
        return channel

    def put_back(self, channel: Channel, error: NodeError | None = None) -> None:
        """End the use of a connection. error: why the last request failed."""
        self.note(error)
        if channel.is_open:
            with self._lock:
                self._idle.append(channel)

    def note(self, error: NodeError | None) -> None:
        """Note the outcome of a request."""
        if error is not None:
            self.last_error = str(error)
        if self.breaker.note(error is None):
            state = "in use again" if error is None else f"not in use: {error}"
            logger.warning("node %s is %s", self.path, state)

    def close(self) -> None:
        """Say goodbye, if nothing of this process uses a slot any more, and close."""
        self._is_closed = True
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle if self._process.is_here else ():
            with suppress(NodeError):
                channel.notify(protocol.DetachNotice(), time.monotonic() + 1.0)
            channel.close()
