"""One connection of a node: an engine's process, its requests and their answers."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress

from kvtier.errors import CacheError
from kvtier.keyed.cache import BlockLocation
from kvtier.node import protocol
from kvtier.node.deleting import delete_blocks
from kvtier.node.engines import AttachedEngine, AttachError, EngineProcess, Holdings
from kvtier.node.node import CacheNode
from kvtier.node.protocol import FromEngine, FromNode, ProtocolError, split_keys, unpack
from kvtier.node.room import NodeRoom, RoomKey
from kvtier.types import HOST, Slot

logger = logging.getLogger(__name__)

RECEIVED_AT_ONCE = 1 << 20
MOST_UNSENT_BYTES = 256 << 20
"""A process that reads none of its answers is disconnected when so many bytes wait for it."""
DELETE_S = 8.0
"""Longest wait of an engine's deletion for storage to confirm it."""
LOOK_AGAIN_S = 0.05
"""Longest time between two looks at whether a fetch has ended."""

PLACES = {
    BlockLocation.NOWHERE: protocol.ABSENT,
    BlockLocation.ARRIVING: protocol.ARRIVING,
    BlockLocation.MEMORY: protocol.MEMORY,
    BlockLocation.STORAGE: protocol.STORAGE,
    BlockLocation.UNKNOWN: protocol.UNKNOWN,
}
COMING = (BlockLocation.ARRIVING, BlockLocation.STORAGE, BlockLocation.UNKNOWN)


class Registry:
    """Engines by name, and the changes that requests wait for.

    node: the node. Owned by the event loop's thread.
    """

    def __init__(self, node: CacheNode) -> None:
        self.node = node
        self.engines: dict[str, AttachedEngine] = {}
        self._num_connections = 0
        self._changed = asyncio.Event()
        self.wake: Callable[[], object] = lambda: None

    def attach(self, name: str, tenant: str, peer: EngineProcess) -> tuple[int, AttachedEngine]:
        """Return the number of a new connection, and its engine.

        Raises ``AttachError`` if the engine belongs to another tenant.
        """
        engine = self.engines.setdefault(name, AttachedEngine(name, tenant))
        if engine.tenant != tenant:
            raise AttachError(
                f"engine {name!r} belongs to tenant {engine.tenant!r}, not to {tenant!r}"
            )
        self._num_connections += 1
        engine.peers[self._num_connections] = peer
        return self._num_connections, engine

    def detach(self, number: int, engine: AttachedEngine) -> None:
        """Note that a process has ended, or uses no slot any more."""
        peer = engine.peers.pop(number, None)
        if peer is not None:
            peer.close()
        if not engine.peers:
            if engine.num_slots:
                logger.info("engine ended name=%s slots=%d", engine.name, engine.num_slots)
            engine.end()
            self.engines.pop(engine.name, None)

    def changed(self) -> None:
        """Let requests that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, until_s: float) -> bool:
        """Wait for a change; return whether there is time left."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return False
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), min(left_s, LOOK_AGAIN_S))
        return True


class Connection:
    """Serves one process of an engine. Owned by the event loop's thread.

    connection: its socket; closed at the end. peer: its process.
    """

    def __init__(self, registry: Registry, connection: socket.socket, peer: EngineProcess) -> None:
        self._registry = registry
        self._node = registry.node
        self._socket = connection
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._frames = protocol.Frames()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._num_unsent = 0
        self._number = 0
        self._engine: AttachedEngine | None = None
        self._rooms: dict[int, NodeRoom] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = True
        connection.setblocking(False)
        self._loop.add_reader(connection, self._receive)

    # -- bytes -------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            received = self._socket.recv(RECEIVED_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self.close()
            return
        try:
            for content in self._frames.take(received):
                self._handle(protocol.decode_engine(content))
                if not self._is_open:
                    return
        except ProtocolError as error:
            logger.warning("disconnected pid=%d reason=%s", self._peer.pid, error)
            self.close()

    def send(self, message: FromNode, fds: Sequence[int] = ()) -> None:
        """Send a message, with file descriptors."""
        if not self._is_open:
            return
        content = protocol.frame(message)
        self._unsent.append((content, list(fds)))
        self._num_unsent += len(content)
        if len(self._unsent) == 1:
            self._send_further()
        if self._num_unsent > MOST_UNSENT_BYTES:
            logger.warning("disconnected pid=%d reason=it reads no answers", self._peer.pid)
            self.close()

    def _send_further(self) -> None:
        try:
            while self._unsent:
                content, fds = self._unsent[0]
                if fds:
                    num = socket.send_fds(self._socket, [content], fds)
                else:
                    num = self._socket.send(content)
                self._num_unsent -= num
                if num < len(content):
                    self._unsent[0] = (content[num:], [])
                    break
                self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if self._unsent:
            self._loop.add_writer(self._socket, self._send_further)
        else:
            self._loop.remove_writer(self._socket)

    def close(self) -> None:
        """Close the socket. What the process uses is kept until the process has ended."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for task in self._tasks:
            task.cancel()
        if self._engine is None:
            self._peer.close()
        elif self._peer.has_ended:
            self._registry.detach(self._number, self._engine)
        else:
            self._loop.add_reader(self._peer.pidfd, self._note_end)

    def _note_end(self) -> None:
        self._loop.remove_reader(self._peer.pidfd)
        assert self._engine is not None
        self._registry.detach(self._number, self._engine)

    # -- messages ----------------------------------------------------------------------------------

    def _handle(self, message: FromEngine) -> None:
        match message:
            case protocol.AttachRequest():
                self._hello(message)
            case _ if self._engine is None:
                raise ProtocolError("the first message is no AttachRequest")
            case protocol.OpenRequest():
                self._open_room(message)
            case protocol.DetachNotice():
                self._goodbye()
            case protocol.RoomRequest() | protocol.RoomNotice():
                self._serve(message, self._engine)

    def _hello(self, hello: protocol.AttachRequest) -> None:
        if hello.version < protocol.OLDEST_VERSION or hello.oldest_version > protocol.VERSION:
            self._refuse(
                hello.id,
                f"the engine speaks versions {hello.oldest_version} to {hello.version} of the "
                f"protocol, the node {protocol.OLDEST_VERSION} to {protocol.VERSION}; upgrade the "
                "older one",
            )
            return
        try:
            self._number, self._engine = self._registry.attach(
                hello.engine, hello.tenant, self._peer
            )
        except AttachError as error:
            self._refuse(hello.id, str(error))
            return
        memory = self._node.memory
        welcome = protocol.AttachAnswer(
            hello.id,
            min(protocol.VERSION, hello.version),
            memory.num_bytes,
            memory.segment_bytes,
            self._node.instance,
            self._node.storage_names,
        )
        self.send(welcome, [memory.fd])

    def _refuse(self, request: int, reason: str) -> None:
        self.send(protocol.RefusedAnswer(request, reason))

    def _open_room(self, message: protocol.OpenRequest) -> None:
        assert self._engine is not None
        key = RoomKey(self._engine.tenant, message.scope, message.block_bytes, message.key_bytes)
        if message.block_bytes < 1 or not 1 <= message.key_bytes <= 256 or not message.scope:
            raise ProtocolError(f"no room can be opened for {message.block_bytes} bytes")
        try:
            number, room = self._node.room(key)
        except CacheError as error:
            self._refuse(message.id, str(error))
            return
        self._rooms[number] = room
        self.send(protocol.OpenAnswer(message.id, number, room.tier.num_slots), [room.tier.fd])

    def _goodbye(self) -> None:
        assert self._engine is not None
        engine, self._engine = self._engine, None
        engine.peers[self._number] = self._peer
        self.close()
        engine.peers.pop(self._number)
        self._registry.detach(self._number, engine)

    def _serve(
        self, message: protocol.RoomRequest | protocol.RoomNotice, engine: AttachedEngine
    ) -> None:
        room = self._rooms.get(message.room)
        if room is None:
            raise ProtocolError("a message names a room that was not opened")
        held = engine.holdings(message.room, room)
        match message:
            case protocol.LookupRequest():
                self.send(_look_up(message, held))
            case protocol.ReserveRequest():
                self.send(_reserve(message, held))
            case protocol.PromoteRequest():
                keys = _keys(message.keys, room)
                self.send(
                    protocol.PromoteAnswer(
                        message.id, room.promote(keys, _keys(message.beside, room))
                    )
                )
            case protocol.FetchRequest():
                self._begin(self._fetch(message, held))
            case protocol.FindRequest():
                self._begin(self._find(message, room))
            case protocol.DeleteRequest():
                self._begin(self._delete(message, room))
            case protocol.WatchNotice():
                self._begin(self._watch(message, room))
            case protocol.CommitNotice():
                held.commit(
                    _slots(message.slots), unpack(message.depths).tolist(), message.to_storage
                )
            case protocol.AbortNotice():
                held.abort(_slots(message.slots))
            case protocol.ReleaseNotice():
                held.release(_slots(message.slots))
            case protocol.DistrustNotice():
                held.distrust(_slots(message.slots))
            case protocol.UseNotice():
                room.touch(_keys(message.keys, room))
            case protocol.PromptNotice():
                room.on_request(_keys(message.keys, room))
            case protocol.ContinueNotice():
                room.continues(_keys(message.keys, room), message.before)
            case protocol.HintNotice():
                room.apply(_keys(message.keys, room), message.said)

    # -- requests that wait ------------------------------------------------------------------------

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        self._registry.wake()
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _find(self, message: protocol.FindRequest, room: NodeRoom) -> None:
        keys = _keys(message.keys, room)
        until_s = time.monotonic() + message.timeout_s
        while True:
            places, pending = room.begin_lookup(keys)
            if not any(not each.is_over for each in pending):
                break
            if not await self._registry.wait(until_s):
                break
        told = {BlockLocation.NOWHERE: protocol.MISSING, BlockLocation.UNKNOWN: protocol.FAILED}
        found = bytes(told.get(place, protocol.THERE) for place in places)
        self.send(protocol.OutcomesAnswer(message.id, found))

    async def _tell_answers(self, message: protocol.LookupRequest, room: NodeRoom) -> None:
        """Tell that the look-ups in storage of a request have been answered."""
        _, pending = room.begin_lookup(_keys(message.keys, room), message.has_gaps)
        while not all(each.is_over for each in pending):
            await self._registry.wait(time.monotonic() + LOOK_AGAIN_S)
        self.send(protocol.EndedNotice(message.id))

    async def _watch(self, message: protocol.WatchNotice, room: NodeRoom) -> None:
        waiter = room.wait_for_reads(_keys(message.keys, room))
        while not waiter.is_over:
            await self._registry.wait(time.monotonic() + LOOK_AGAIN_S)
        self.send(protocol.EndedNotice(message.watch))

    async def _delete(self, message: protocol.DeleteRequest, room: NodeRoom) -> None:
        keys = _keys(message.keys, room)
        until_s = time.monotonic() + DELETE_S
        left = await delete_blocks(room, keys, self._registry.wait, until_s)
        outcomes = (
            protocol.FAILED if at in left else protocol.MISSING for at, _ in enumerate(keys)
        )
        self.send(protocol.OutcomesAnswer(message.id, bytes(outcomes)))

    async def _fetch(self, message: protocol.FetchRequest, held: Holdings) -> None:
        """Read a prompt's blocks into memory, as many as there is room for, and lease them."""
        room = held.room
        keys = _keys(message.keys, room)
        places = await bring(room, keys, self._registry, time.monotonic() + message.timeout_s)
        there = [place is BlockLocation.MEMORY for place in places]
        ready = [key for key, is_there in zip(keys, there, strict=True) if is_there]
        slots = [-1] * len(keys)
        generations = [0] * len(keys)
        leased = held.lease(ready)
        at = [number for number, is_there in enumerate(there) if is_there]
        for number, slot, told in zip(at, leased, room.generations(leased).tolist(), strict=True):
            slots[number], generations[number] = slot, told
        failed = bytes(place in COMING for place in places)
        answer = protocol.FetchAnswer(
            message.id, protocol.pack(slots), protocol.pack(generations), failed
        )
        self.send(answer)


async def bring(
    room: NodeRoom, keys: Sequence[bytes], registry: Registry, until_s: float
) -> list[BlockLocation]:
    """Read a prompt's blocks from storage into memory, as many as there is room for.

    Returns the locations of the blocks when all have arrived, or at ``until_s``.
    """
    promoted: set[bytes] = set()
    while True:
        places, pending = room.begin_lookup(keys)
        stored = [
            key
            for key, place in zip(keys, places, strict=True)
            if place is BlockLocation.STORAGE and key not in promoted
        ]
        if stored:
            promoted.update(stored[: room.promote(stored)])
            places = room.locate_all(keys)
        is_waiting = any(not each.is_over for each in pending) or any(
            place is BlockLocation.ARRIVING for place in places
        )
        if not is_waiting or not await registry.wait(until_s):
            return places


def _keys(keys: bytes, room: NodeRoom) -> list[bytes]:
    return split_keys(keys, room.key.key_bytes)


def _slots(slots: bytes) -> list[Slot]:
    found: list[Slot] = unpack(slots).tolist()
    return found


def _look_up(message: protocol.LookupRequest, held: Holdings) -> protocol.LookupAnswer:
    room = held.room
    keys = _keys(message.keys, room)
    places, pending = room.begin_lookup(keys, message.has_gaps)
    ready = [key for key, place in zip(keys, places, strict=True) if place is BlockLocation.MEMORY]
    slots = held.lease(ready)
    tiers = {name: at for at, name in enumerate((HOST, *room.ladder.storages))}
    sources = bytes(tiers[name] for name in room.sources(keys))
    return protocol.LookupAnswer(
        message.id,
        bytes(PLACES[place] for place in places),
        protocol.pack(slots),
        protocol.pack(room.generations(slots)),
        sources,
        sum(not each.is_over for each in pending),
    )


def _reserve(message: protocol.ReserveRequest, held: Holdings) -> protocol.ReserveAnswer:
    room = held.room
    keys = _keys(message.keys, room)
    reserved = room.reserve(keys)
    new = set(reserved.keys) if reserved is not None else set()
    slots = list(reserved.slots) if reserved is not None else []
    if reserved is not None:
        held.reserved.update(zip(slots, reserved.keys, strict=True))
    missing = (BlockLocation.NOWHERE, BlockLocation.STORAGE, BlockLocation.UNKNOWN)
    places = room.locate_all(keys)
    return protocol.ReserveAnswer(
        message.id,
        bytes(key in new for key in keys),
        bytes(
            key not in new and place not in missing for key, place in zip(keys, places, strict=True)
        ),
        protocol.pack(slots),
        protocol.pack(room.generations(slots)),
    )
