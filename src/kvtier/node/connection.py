"""One connection of a node: an engine's process, its requests and their answers."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np

from kvtier.errors import CacheError
from kvtier.keyed.cache import BlockLocation
from kvtier.keyed.waiters import Awaited
from kvtier.ladder import PendingLookup
from kvtier.node import protocol
from kvtier.node.deleting import delete_blocks
from kvtier.node.engines import AttachedEngine, AttachError, EngineProcess, Holdings
from kvtier.node.protocol import FromEngine, FromNode, ProtocolError, split_keys, unpack
from kvtier.node.registry import Registry
from kvtier.node.room import NodeRoom, RoomKey
from kvtier.types import Slot

logger = logging.getLogger(__name__)

RECEIVED_AT_ONCE = 256 << 10
TURN_S = 1e-3
"""A connection handles messages for so long, then the others have a turn."""
MANY_UNSENT_BYTES = 1 << 20
"""While so many bytes of answers wait for a process to read them, nothing is read from it."""
MOST_UNSENT_BYTES = 64 << 20
"""A process that reads none of its answers is disconnected when so many bytes wait for it."""
DELETE_S = 8.0
"""Longest wait of an engine's deletion for storage to confirm it."""
MOST_WAITING = 1024
"""Most requests of a connection that wait for storage or for other engines at a time."""
HELLO_S = 10.0
"""A connection that has not attached after this time is closed."""
LONGEST_WAIT_S = 3600.0

Slots = TypeVar("Slots")

SLOT_NOTICES = (
    protocol.CommitNotice,
    protocol.AbortNotice,
    protocol.ReleaseNotice,
    protocol.DetachNotice,
)
COMING = (BlockLocation.ARRIVING, BlockLocation.STORAGE, BlockLocation.UNKNOWN)


class _Unsent(NamedTuple):
    """An answer, or the rest of one, that was not sent yet. See ``Connection.send``."""

    content: bytes
    fds: Sequence[int]
    undo: Callable[[], object] | None


class Connection:
    """Serves one connection of an engine's process. Owned by the event loop's thread.

    connection: its socket; closed at the end, as ``peer`` is. peer: its process.

    Raises:
        AttachError: the process has too many connections.
    """

    def __init__(self, registry: Registry, connection: socket.socket, peer: EngineProcess) -> None:
        registry.enter(peer)
        self._registry = registry
        self._node = registry.node
        self._socket = connection
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._frames = protocol.Frames(protocol.MAX_FIRST_BYTES)
        self._coming: Iterator[bytes] = iter(())
        self._turn: asyncio.Handle | None = None
        self._unsent: deque[_Unsent] = deque()
        self._num_unsent = 0
        self._is_writing = self._is_read = self._is_broken = self._is_hung_up = False
        self._number = 0
        self._client = ""
        self._engine: AttachedEngine | None = None
        self._memory_fd = -1
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = True
        self._expiry = self._loop.call_later(HELLO_S, self._expire)
        connection.setblocking(False)
        self._choose_reading()

    # -- bytes -------------------------------------------------------------------------------------

    def _choose_reading(self) -> None:
        """Read from the socket, unless messages are to be handled or answers wait to be read."""
        may_read = self._is_broken or self._num_unsent < MANY_UNSENT_BYTES
        wanted = self._is_open and self._turn is None and may_read
        if wanted and not self._is_read:
            self._loop.add_reader(self._socket, self._receive)
        elif self._is_read and not wanted:
            self._loop.remove_reader(self._socket)
        self._is_read = wanted

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
        self._coming = self._frames.take(received)
        self._take_turn()

    def _take_turn(self) -> None:
        """Handle messages for a while. Other connections have a turn before it goes on."""
        self._turn = None
        end_s = time.monotonic() + TURN_S
        try:
            for content in self._coming:
                self._handle(protocol.decode_engine(content))
                if not self._is_open:
                    return
                if time.monotonic() >= end_s:
                    self._turn = self._loop.call_soon(self._take_turn)
                    break
        except ProtocolError as error:
            logger.warning("disconnected pid=%d reason=%s", self._peer.pid, error)
            self.close()
        except Exception:  # one process's message must not end the cache of the others
            logger.exception("disconnected pid=%d reason=its message failed", self._peer.pid)
            self._turn = self._loop.call_soon(self._take_turn)
            self.hang_up()
        else:
            self._choose_reading()

    def send(
        self, message: FromNode, fds: Sequence[int] = (), undo: Callable[[], object] | None = None
    ) -> None:
        """Send a message, with file descriptors.

        undo: called if the process never reads the whole message.
        """
        if not self._is_open or self._is_hung_up:
            if undo is not None:
                undo()
            return
        content = protocol.frame(message)
        self._unsent.append(_Unsent(content, fds, undo))
        self._num_unsent += len(content)
        if len(self._unsent) == 1 and not self._is_broken:
            self._send_further()
        if self._num_unsent > MOST_UNSENT_BYTES:
            logger.warning("disconnected pid=%d reason=it reads no answers", self._peer.pid)
            self.hang_up()

    def _send_further(self) -> None:
        is_stuck = False
        while self._unsent and not is_stuck:
            first = self._unsent[0]
            try:
                if first.fds:
                    num = socket.send_fds(self._socket, [first.content], list(first.fds))
                else:
                    num = self._socket.send(first.content)
            except BlockingIOError:
                break
            except OSError:  # it reads nothing more; what it has sent before is handled first
                self._is_broken = True
                break
            self._num_unsent -= num
            is_stuck = num < len(first.content)
            if is_stuck:
                self._unsent[0] = _Unsent(first.content[num:], (), first.undo)
            else:
                self._unsent.popleft()
        is_writing = bool(self._unsent) and not self._is_broken
        if is_writing and not self._is_writing:
            self._loop.add_writer(self._socket, self._send_further)
        elif self._is_writing and not is_writing:
            self._loop.remove_writer(self._socket)
        self._is_writing = is_writing
        self._choose_reading()

    def _expire(self) -> None:
        if self._engine is None:
            self.close()

    def hang_up(self) -> None:
        """Serve the process no further. What it says of its slots counts until it closes, too."""
        if not self._is_open or self._is_hung_up:
            return
        self._is_hung_up = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._forget_requests()
        self._choose_reading()

    def end_if_closed(self) -> None:
        """Handle what has arrived, and close, if the process has closed its end."""
        poll = select.poll()
        poll.register(self._socket, select.POLLHUP)
        while self._is_open and poll.poll(0):
            if self._turn is not None:
                self._turn.cancel()
                self._take_turn()
            else:
                self._receive()

    def _forget_requests(self) -> None:
        """Answer no request any more."""
        for task in self._tasks:
            task.cancel()
        unsent, self._unsent, self._num_unsent = self._unsent, deque(), 0
        for answer in unsent:
            if answer.undo is not None:
                answer.undo()

    def close(self, is_goodbye: bool = False) -> None:
        """Close the socket. What the process was told of is kept until its client has ended.

        is_goodbye: see ``Registry.detach``.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._expiry.cancel()
        if self._turn is not None:
            self._turn.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
        self._forget_requests()
        self._registry.leave(self._peer)
        self._peer.close()
        if self._engine is not None:
            self._registry.detach(self._number, self._client, self._engine, is_goodbye)

    # -- messages ----------------------------------------------------------------------------------

    def _handle(self, message: FromEngine) -> None:
        if self._is_hung_up and not isinstance(message, SLOT_NOTICES):
            return
        match message:
            case protocol.AttachRequest():
                self._hello(message)
            case _ if self._engine is None:
                raise ProtocolError("the first message is no AttachRequest")
            case protocol.OpenRequest():
                self._begin(self._open_room(message, self._engine))
            case protocol.DetachNotice():
                self.close(is_goodbye=True)
            case protocol.RoomRequest() | protocol.RoomNotice():
                self._serve(message, self._engine)

    def _hello(self, hello: protocol.AttachRequest) -> None:
        if self._engine is not None:
            raise ProtocolError("a connection attaches twice")
        if hello.version < protocol.OLDEST_VERSION or hello.oldest_version > protocol.VERSION:
            self._refuse(
                hello.id,
                f"the engine speaks versions {hello.oldest_version} to {hello.version} of the "
                f"protocol, the node {protocol.OLDEST_VERSION} to {protocol.VERSION}; upgrade the "
                "older one",
            )
            return
        try:
            self._number, self._client, self._engine = self._registry.attach(hello, self._peer)
        except AttachError as error:
            self._refuse(hello.id, str(error))
            return
        try:
            self._memory_fd = self._registry.open_memory(self._client, self._engine)
        except OSError as error:
            self._refuse(hello.id, f"the memory can't be passed on: {error.strerror}")
            self.hang_up()
            return
        self._frames.most_bytes = protocol.MAX_FRAME_BYTES
        self._registry.ends[self._number] = self.end_if_closed
        memory = self._node.memory
        welcome = protocol.AttachAnswer(
            hello.id,
            min(protocol.VERSION, hello.version),
            memory.num_bytes,
            memory.segment_bytes,
            self._node.instance,
            self._node.storage_names,
        )
        self.send(welcome, [self._memory_fd])

    def _refuse(self, request: int, reason: str) -> None:
        self.send(protocol.RefusedAnswer(request, reason))

    async def _open_room(self, message: protocol.OpenRequest, engine: AttachedEngine) -> None:
        key = RoomKey(engine.tenant, message.scope, message.block_bytes, message.key_bytes)
        try:
            number, room = await self._registry.opener.open(key)
        except CacheError as error:
            self._refuse(message.id, str(error))
            return
        self.send(protocol.OpenAnswer(message.id, number, room.tier.num_slots), [room.tier.fd])

    def _serve(
        self, message: protocol.RoomRequest | protocol.RoomNotice, engine: AttachedEngine
    ) -> None:
        room = self._node.room_of(message.room, engine.tenant)
        if room is None:
            raise ProtocolError("a message names a room that the tenant has not opened")
        held = engine.holdings(message.room, room)
        match message:
            case protocol.LookupRequest():
                found, pending = _look_up(message, held)
                self._send_slots(found, held.release, unpack(found.slots))
                if pending:
                    self._begin(self._watch(message.id, pending))
            case protocol.ReserveRequest():
                reserved = _reserve(message, held)
                self._send_slots(reserved, held.abort, _slots(reserved.slots))
            case protocol.PromoteRequest():
                keys = _keys(message.keys, room)
                num = room.promote(keys, _keys(message.beside, room))
                self.send(protocol.PromoteAnswer(message.id, num))
            case protocol.FetchRequest():
                keys, until_s = _keys(message.keys, room), _until(message.timeout_s)
                self._begin(self._fetch(message.id, keys, until_s, held))
            case protocol.FindRequest():
                keys, until_s = _keys(message.keys, room), _until(message.timeout_s)
                self._begin(self._find(message.id, keys, until_s, room))
            case protocol.DeleteRequest():
                self._begin(self._delete(message.id, _keys(message.keys, room), room))
            case protocol.WatchNotice():
                awaited = [room.wait_for_reads(_keys(message.keys, room))]
                self._begin(self._watch(message.watch, awaited))
            case protocol.CommitNotice():
                slots, depths = _slots(message.slots), unpack(message.depths)
                if len(slots) != len(depths) or ((depths < 0) | (depths >= 1 << 32)).any():
                    raise ProtocolError("slots and their depths don't agree")
                held.commit(slots, depths.tolist(), message.to_storage)
                self._registry.note_writes()
            case protocol.AbortNotice():
                held.abort(_slots(message.slots))
                self._registry.note_writes()
            case protocol.ReleaseNotice():
                held.release(unpack(message.slots))
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

    def _send_slots(
        self,
        answer: protocol.LookupAnswer | protocol.FetchAnswer | protocol.ReserveAnswer,
        give_back: Callable[[Slots], object],
        slots: Slots,
    ) -> None:
        """Send an answer with slots, which are given back if the process is never told of them."""
        self.send(answer, undo=lambda: give_back(slots))

    # -- requests that wait ------------------------------------------------------------------------

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        self._registry.wake()
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        if len(self._tasks) > MOST_WAITING:
            raise ProtocolError(f"more than {MOST_WAITING} requests wait at a time")

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error(
                "disconnected pid=%d reason=its request failed", self._peer.pid, exc_info=error
            )
            self.hang_up()

    async def _find(
        self, request: int, keys: Sequence[bytes], until_s: float, room: NodeRoom
    ) -> None:
        while True:
            places, pending = room.begin_lookup(keys)
            if not pending or not await self._registry.all_over(pending, until_s):
                break
        told = {BlockLocation.NOWHERE: protocol.MISSING, BlockLocation.UNKNOWN: protocol.FAILED}
        found = bytes(told.get(place, protocol.THERE) for place in places)
        self.send(protocol.OutcomesAnswer(request, found))

    async def _watch(self, watch: int, awaited: Sequence[Awaited]) -> None:
        await self._registry.all_over(awaited, time.monotonic() + LONGEST_WAIT_S)
        self.send(protocol.EndedNotice(watch))

    async def _delete(self, request: int, keys: Sequence[bytes], room: NodeRoom) -> None:
        until_s = time.monotonic() + DELETE_S
        left = await delete_blocks(room, keys, self._registry.wait, until_s)
        outcomes = (
            protocol.FAILED if at in left else protocol.MISSING for at, _ in enumerate(keys)
        )
        self.send(protocol.OutcomesAnswer(request, bytes(outcomes)))

    async def _fetch(
        self, request: int, keys: Sequence[bytes], until_s: float, held: Holdings
    ) -> None:
        """Read a prompt's blocks into memory, as many as there is room for, and lease them."""
        room = held.room
        places = await bring(room, keys, self._registry, until_s)
        there = np.array([place is BlockLocation.MEMORY for place in places], bool)
        ready = [keys[at] for at in np.flatnonzero(there).tolist()]
        slots, generations = np.full(len(keys), -1), np.zeros(len(keys), np.int64)
        leased = held.lease(room.ready_blocks(ready))
        slots[there], generations[there] = leased, room.generations(leased)
        failed = bytes(place in COMING for place in places)
        answer = protocol.FetchAnswer(
            request, protocol.pack(slots), protocol.pack(generations), failed
        )
        self._send_slots(answer, held.release, leased)


def _until(timeout_s: float) -> float:
    """Return the time at which a wait ends. Raises ``ProtocolError`` if it is no number."""
    if math.isnan(timeout_s):
        raise ProtocolError("a time-out is no number")
    return time.monotonic() + min(max(timeout_s, 0.0), LONGEST_WAIT_S)


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
        awaited: list[Awaited] = [*pending, room.wait_for_reads(keys)]
        if all(each.is_over for each in awaited):
            return room.locate_all(keys)
        if not await registry.all_over(awaited, until_s):
            return room.locate_all(keys)


def _keys(keys: bytes, room: NodeRoom) -> list[bytes]:
    return split_keys(keys, room.key.key_bytes)


def _slots(slots: bytes) -> list[Slot]:
    found: list[Slot] = unpack(slots).tolist()
    return found


def _look_up(
    message: protocol.LookupRequest, held: Holdings
) -> tuple[protocol.LookupAnswer, list[PendingLookup]]:
    room = held.room
    found = room.look_up(_keys(message.keys, room), message.has_gaps)
    slots = held.lease(found.ready)
    answer = protocol.LookupAnswer(
        message.id,
        found.codes.tobytes(),
        protocol.pack(slots),
        protocol.pack(room.generations(slots)),
        found.sources.tobytes(),
        len(found.pending),
    )
    return answer, found.pending


def _reserve(message: protocol.ReserveRequest, held: Holdings) -> protocol.ReserveAnswer:
    room = held.room
    keys = _keys(message.keys, room)
    reserved = held.reserve(keys)
    new = dict.fromkeys(keys, False)
    slots: Sequence[Slot] = ()
    if reserved is not None:
        new.update(dict.fromkeys(reserved.keys, True))
        slots = reserved.slots
    # A key that is named twice is new once.
    is_new = np.array([new.pop(key, False) for key in keys], bool)
    is_known = np.zeros(len(keys), bool)
    if not is_new.all():
        is_known = np.isin(room.codes(keys), (protocol.MEMORY, protocol.ARRIVING)) & ~is_new
    return protocol.ReserveAnswer(
        message.id,
        is_new.tobytes(),
        is_known.tobytes(),
        protocol.pack(slots),
        protocol.pack(room.generations(slots)),
    )
