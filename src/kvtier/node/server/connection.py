"""One connection of a node: an engine's process, its requests and their answers."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

import numpy as np

from kvtier.cache.block_cache import BlockState
from kvtier.cache.ladder import PendingLookup
from kvtier.cache.local import LocatedBlocks
from kvtier.core.errors import CacheError
from kvtier.core.keys import PackedKeys, select_keys
from kvtier.index.selection import Int64s
from kvtier.node.server.deleting import delete_blocks
from kvtier.node.server.engines import AttachedEngine, AttachError, EngineProcess, Holdings
from kvtier.node.server.partition import Partition
from kvtier.node.server.partition_key import PartitionKey
from kvtier.node.server.registry import Registry
from kvtier.node.server.reservations import OVERDUE_S
from kvtier.node.wire import protocol
from kvtier.node.wire.frame_socket import FrameSocket
from kvtier.node.wire.protocol import (
    FromEngine,
    FromNode,
    ProtocolError,
    Turns,
    split_keys,
    turns_of,
    unpack,
)
from kvtier.plan.decide import Awaited

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 64 << 20
"""A process that reads none of its answers is disconnected when so many bytes wait for it."""
DELETE_S = 8.0
"""Longest wait of an engine's deletion for storage to confirm it."""
MAX_WAITING = 1024
"""Most requests of a connection that wait for storage or for other engines at a time."""
HELLO_S = 10.0
"""A connection that has not attached after this time is closed."""
LONGEST_WAIT_S = 3600.0

SLOT_NOTICES = (
    protocol.CommitNotice,
    protocol.AbortNotice,
    protocol.ReleaseNotice,
    protocol.DetachNotice,
)
OUTCOMES = bytes(
    {BlockState.NOWHERE: protocol.MISSING, BlockState.UNKNOWN: protocol.FAILED}.get(
        state, protocol.THERE
    )
    for state in BlockState
).ljust(256, b"\0")
"""Outcomes of a ``FindRequest`` by the code of a block's state, to translate bytes."""
COMING = (BlockState.ARRIVING, BlockState.STORAGE, BlockState.UNKNOWN)


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
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._client = ""
        self._engine: AttachedEngine | None = None
        self._memory_fd = -1
        self._recent: tuple[int, Holdings] | None = None  # partition of the last message
        self._tasks: set[asyncio.Task[None]] = set()
        self._expiry = self._loop.call_later(HELLO_S, self._expire)
        self._frames = FrameSocket(connection, self._take, self._fail, self.close)

    def _take(self, content: memoryview) -> Turns | None:
        """Handle one message. Return the rest of its work in turns; None if it is done."""
        if self._serve_simply(content):
            return None
        return self._handle(protocol.decode_engine(content))

    def _fail(self, error: Exception) -> None:
        """Disconnect a process whose message failed. Other processes are served as before."""
        if isinstance(error, ProtocolError):
            logger.warning("disconnected pid=%d reason=%s", self._peer.pid, error)
            self.close()
        else:
            reason = "disconnected pid=%d reason=its message failed"
            logger.error(reason, self._peer.pid, exc_info=error)
            self.hang_up()

    def send(
        self, message: FromNode, fds: Sequence[int] = (), undo: Callable[[], object] | None = None
    ) -> None:
        """Send a message, with file descriptors.

        undo: called if the process never reads the whole message, and so never uses its slots.
        """
        self._send_frame(protocol.frame(message), fds, undo)

    def _send_frame(
        self,
        frame: bytes | bytearray,
        fds: Sequence[int],
        undo: Callable[[], object] | None,
    ) -> None:
        self._frames.send(frame, fds, undo)
        if self._frames.num_unsent > MAX_UNSENT_BYTES:
            logger.warning("disconnected pid=%d reason=it reads no answers", self._peer.pid)
            self.hang_up()

    def _expire(self) -> None:
        if self._engine is None:
            self.close()

    def hang_up(self) -> None:
        """Serve the process no further. Its notices on slots still count until it closes."""
        self._cancel_tasks()
        self._frames.hang_up()

    def _cancel_tasks(self) -> None:
        """Answer no request any more that waits."""
        for task in self._tasks:
            task.cancel()

    def close(self, is_goodbye: bool = False) -> None:
        """Close the socket. Slots that the process was given stay reserved until its client ends.

        is_goodbye: see ``Registry.detach``.
        """
        if not self._frames.is_open:
            return
        self._expiry.cancel()
        self._cancel_tasks()
        self._frames.close()
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
        self._registry.leave(self._peer)
        self._peer.close()
        if self._engine is not None:
            self._registry.detach(self._number, self._client, self._engine, is_goodbye)

    # -- messages ----------------------------------------------------------------------------------

    def _handle(self, message: FromEngine) -> Turns | None:
        if self._frames.is_hung_up and not isinstance(message, SLOT_NOTICES):
            return None
        match message:
            case protocol.PartitionRequest() | protocol.PartitionNotice() if (
                self._engine is not None
            ):
                return self._serve(message, self._engine)
            case protocol.AttachRequest():
                self._hello(message)
            case _ if self._engine is None:
                raise ProtocolError("the first message is no AttachRequest")
            case protocol.OpenRequest():
                self._begin(self._open_partition(message, self._engine), self._engine)
            case protocol.DetachNotice():
                self.close(is_goodbye=True)
            case protocol.ReportNotice():
                self._engine.num_failures += max(0, message.failures)
                self._engine.num_pauses += max(0, message.pauses)
        return None

    def _hello(self, hello: protocol.AttachRequest) -> None:
        if self._engine is not None:
            raise ProtocolError("a connection attaches twice")
        if not hello.oldest_version <= protocol.VERSION <= hello.version:
            self._refuse(
                hello.id,
                f"the engine speaks versions {hello.oldest_version} to {hello.version} of the "
                f"protocol, the node {protocol.VERSION}; upgrade the older one",
            )
            return
        try:
            self._number, self._client, self._engine = self._registry.attach(
                hello, self._peer, self._frames
            )
        except AttachError as error:
            self._refuse(hello.id, str(error))
            return
        try:
            self._memory_fd = self._node.memory.records.users.open_memory(
                self._engine.clients[self._client].number
            )
        except OSError as error:
            self._refuse(hello.id, f"the memory can't be passed on: {error.strerror}")
            self.hang_up()
            return
        self._frames.accept_up_to(protocol.MAX_FRAME_BYTES)
        memory = self._node.memory
        welcome = protocol.AttachAnswer(
            hello.id,
            protocol.VERSION,
            memory.num_bytes,
            memory.segment_bytes,
            self._node.instance,
            self._node.storage_names,
            self._node.events is not None,
        )
        self.send(welcome, [self._memory_fd])

    def _refuse(self, request: int, reason: str) -> None:
        self.send(protocol.RefusedAnswer(request, reason))

    async def _open_partition(self, message: protocol.OpenRequest, engine: AttachedEngine) -> None:
        key = PartitionKey(
            engine.tenant,
            message.scope,
            message.block_bytes,
            message.key_bytes,
            message.group_bytes,
        )
        try:
            number, partition = await self._registry.opener.open(key)
        except CacheError as error:
            self._refuse(message.id, str(error))
            return
        tier = partition.tier
        capacity = self._node.memory.num_bytes + sum(partition.capacity_by_storage().values())
        self.send(protocol.OpenAnswer(message.id, number, tier.num_slots, capacity), [tier.fd])

    def _serve_simply(self, content: memoryview) -> bool:
        """Serve a message on the partition of the message before, if one native call can.

        Returns False if it is to be decoded, and nothing has changed.
        """
        if self._recent is None or self._frames.is_hung_up:
            return False
        number, held = self._recent
        served = held.serve(content, number)
        if served is None:
            return False
        answer, counts = served
        self._node.note_use(number)
        if answer:
            self._send_frame(answer, (), partial(_undo, held, answer))
        if counts:
            self._registry.lookups.add(time.monotonic() - self._frames.received_s)
        return True

    def _serve(
        self, message: protocol.PartitionRequest | protocol.PartitionNotice, engine: AttachedEngine
    ) -> Turns | None:
        partition = self._node.partition_of(message.partition, engine.tenant)
        if partition is None:
            raise ProtocolError("a message names a room that the tenant has not opened")
        held = engine.holdings(message.partition, partition)
        self._recent = message.partition, held
        match message:
            case protocol.LookupRequest():
                found, pending = _look_up(message, held)
                self.send(found, undo=lambda: held.release(unpack(found.slots)))
                if message.counts:
                    self._registry.lookups.add(time.monotonic() - self._frames.received_s)
                if pending:
                    self._begin(self._watch(message.id, pending), engine)
            case protocol.ReleaseNotice():
                held.release(unpack(message.slots))
            case protocol.ReserveRequest():
                return self._reserve(message, held)
            case protocol.CommitNotice():
                return self._commit(message, held)
            case protocol.PromoteRequest():
                return self._promote(message, partition)
            case protocol.FetchRequest():
                keys, until_s = _keys(message.keys, partition), _until(message.timeout_s)
                self._begin(self._fetch(message.id, keys, until_s, held), engine)
            case protocol.FindRequest():
                keys, until_s = _keys(message.keys, partition), _until(message.timeout_s)
                began_s = self._frames.received_s
                self._begin(self._find(message.id, keys, until_s, partition, began_s), engine)
            case protocol.DeleteRequest():
                self._begin(
                    self._delete(message.id, _keys(message.keys, partition), partition), engine
                )
            case protocol.WatchNotice():
                reads = partition.cache.wait_for_reads(_keys(message.keys, partition))
                patience_s = OVERDUE_S if reads.waits_for_store else LONGEST_WAIT_S
                self._begin(self._watch(message.watch, [reads], patience_s), engine)
            case protocol.AbortNotice():
                return self._abort(unpack(message.slots), held)
            case protocol.DistrustNotice():
                return held.distrust(unpack(message.slots))
            case protocol.UseNotice():
                partition.cache.touch(_keys(message.keys, partition))
            case protocol.PromptNotice():
                partition.cache.on_request(_keys(message.keys, partition))
            case protocol.ContinueNotice():
                partition.cache.continues(_keys(message.keys, partition), message.before)
            case protocol.DescribeNotice():
                if self._node.events is not None:
                    self._node.events.describe(message.partition, partition, message)
            case protocol.CostsNotice():
                engine.costs[message.partition] = message
            case protocol.HintNotice():
                return partition.apply(_keys(message.keys, partition), message.said)
        return None

    # -- messages in turns -------------------------------------------------------------------------

    def _reserve(self, message: protocol.ReserveRequest, held: Holdings) -> Turns:
        """Reserve slots for new blocks, up to the first turn for which there is too little room."""
        keys = _keys(message.keys, held.partition)
        new, known, slots, generations = (bytearray() for _ in range(4))
        for at in turns_of(len(keys)):
            if at.start:
                yield
            reserved = held.reserve(keys[at])
            if reserved is None:
                break
            are_new = _which(reserved[0].keys, keys[at])
            new += are_new
            known += _which_are_known(keys[at], are_new, held.partition)
            slots += protocol.pack(reserved[0].slots)
            generations += reserved[1]
        if left := keys[len(new) :]:
            none = bytes(len(left))
            new += none
            known += _which_are_known(left, none, held.partition)
        answer = protocol.ReserveAnswer(
            message.id, bytes(new), bytes(known), bytes(slots), bytes(generations)
        )
        self.send(answer, undo=lambda: held.abort(unpack(slots)))

    def _commit(self, message: protocol.CommitNotice, held: Holdings) -> Turns:
        slots, depths = unpack(message.slots), unpack(message.depths)
        if len(slots) != len(depths) or depths.view(np.uint64).max(initial=0) >= 1 << 32:
            raise ProtocolError("slots and their depths don't agree")
        for at in turns_of(len(slots)):
            held.commit(slots[at], depths[at], message.to_storage)
            yield
        self._registry.note_writes()

    def _abort(self, slots: Int64s, held: Holdings) -> Turns:
        for at in turns_of(len(slots)):
            held.abort(slots[at])
            yield
        self._registry.note_writes()

    def _promote(self, message: protocol.PromoteRequest, partition: Partition) -> Turns:
        keys, beside = _keys(message.keys, partition), _keys(message.beside, partition)
        num = 0
        for at in turns_of(len(keys)):
            if num:
                yield
            begun = partition.cache.promote(keys[at], beside)
            num += begun
            if begun < at.stop - at.start:
                break
        self.send(protocol.PromoteAnswer(message.id, num))

    # -- requests that wait ------------------------------------------------------------------------

    def _begin(self, work: Coroutine[object, object, None], engine: AttachedEngine) -> None:
        self._registry.wake()
        task = self._loop.create_task(work)
        self._tasks.add(task)
        engine.num_waiting += 1
        task.add_done_callback(partial(self._end_task, engine))
        if len(self._tasks) > MAX_WAITING:
            raise ProtocolError(f"more than {MAX_WAITING} requests wait at a time")

    def _end_task(self, engine: AttachedEngine, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        engine.num_waiting -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error(
                "disconnected pid=%d reason=its request failed", self._peer.pid, exc_info=error
            )
            self.hang_up()

    async def _find(
        self,
        request: int,
        keys: Sequence[bytes],
        until_s: float,
        partition: Partition,
        began_s: float,
    ) -> None:
        waited_s = 0.0
        while True:
            found, pending = partition.lookup(keys)
            if not pending:
                break
            waits_from_s = time.monotonic()
            are_over = await self._registry.all_over(pending, until_s)
            waited_s += time.monotonic() - waits_from_s
            if not are_over:
                break
        partition.looked_up.add(found.codes)
        self.send(protocol.OutcomesAnswer(request, found.codes.translate(OUTCOMES)))
        self._registry.lookups.add(time.monotonic() - began_s - waited_s)

    async def _watch(
        self, watch: int, awaited: Sequence[Awaited], patience_s: float = LONGEST_WAIT_S
    ) -> None:
        began_s = time.monotonic()
        await self._registry.all_over(awaited, began_s + patience_s)
        self.send(protocol.EndedNotice(watch, time.monotonic() - began_s))

    async def _delete(self, request: int, keys: Sequence[bytes], partition: Partition) -> None:
        until_s = time.monotonic() + DELETE_S
        left = await delete_blocks(partition, keys, self._registry.wait, until_s)
        outcomes = (
            protocol.FAILED if at in left else protocol.MISSING for at, _ in enumerate(keys)
        )
        self.send(protocol.OutcomesAnswer(request, bytes(outcomes)))

    async def _fetch(
        self, request: int, keys: Sequence[bytes], until_s: float, held: Holdings
    ) -> None:
        """Read a prompt's blocks into memory, as many as there is room for, and lease them."""
        found = await bring(held.partition, keys, self._registry, until_s)
        there = found.positions(BlockState.MEMORY)
        slots, generations = np.full(len(keys), -1), np.zeros(len(keys), np.int64)
        leased, its_generations = map(unpack, held.lease(found.ready))
        slots[there], generations[there] = leased, its_generations
        failed = bytes(code in COMING for code in found.codes)
        answer = protocol.FetchAnswer(
            request, protocol.pack(slots), protocol.pack(generations), failed
        )
        self.send(answer, undo=lambda: held.release(leased))


def _until(timeout_s: float) -> float:
    """Return the time at which a wait ends. Raises ``ProtocolError`` if it is no number."""
    if math.isnan(timeout_s):
        raise ProtocolError("a time-out is no number")
    return time.monotonic() + min(max(timeout_s, 0.0), LONGEST_WAIT_S)


async def bring(
    partition: Partition, keys: Sequence[bytes], registry: Registry, until_s: float
) -> LocatedBlocks:
    """Read a prompt's blocks from storage into memory, as many as there is room for.

    Returns the blocks as they are when all have arrived, or at ``until_s``.
    """
    promoted: set[bytes] = set()
    while True:
        found, pending = partition.lookup(keys)
        in_storage = select_keys(keys, found.positions(BlockState.STORAGE))
        stored = [key for key in in_storage if key not in promoted]
        for at in turns_of(len(stored)):
            begun = stored[at][: partition.cache.promote(stored[at])]
            promoted.update(begun)
            if len(begun) < at.stop - at.start:
                break
            await asyncio.sleep(0)
        reads = partition.cache.wait_for_reads(keys)
        awaited: list[Awaited] = [*pending, reads]
        if reads.waits_for_store:
            until_s = min(until_s, time.monotonic() + OVERDUE_S)
        if all(each.is_over for each in awaited):
            return partition.locate(keys)
        if not await registry.all_over(awaited, until_s):
            return partition.locate(keys)


def _keys(keys: bytes, partition: Partition) -> PackedKeys:
    return split_keys(keys, partition.key.key_bytes)


def _look_up(
    message: protocol.LookupRequest, held: Holdings
) -> tuple[protocol.LookupAnswer, list[PendingLookup]]:
    partition = held.partition
    found, begun = partition.lookup(_keys(message.keys, partition), message.has_gaps)
    if message.counts:
        partition.looked_up.add(found.codes)
    num = len(found.codes)
    sources = bytes(num) if found.are_all_in_memory else found.sources.tobytes()
    slots, generations = held.lease(found.ready)
    pending = [lookup for lookup in begun if not lookup.is_over]
    answer = protocol.LookupAnswer(
        message.id, found.codes, slots, generations, sources, len(pending)
    )
    return answer, pending


def _undo(held: Holdings, frame: bytes) -> None:
    """Give up the slots of an undelivered answer. frame: of a look-up's, or of a reservation's."""
    answer = protocol.decode_node(memoryview(frame)[protocol.FRAME_HEADER.size :])
    if isinstance(answer, protocol.ReserveAnswer):
        held.abort(unpack(answer.slots))
    else:
        assert isinstance(answer, protocol.LookupAnswer), "no other message is answered simply"
        held.release(unpack(answer.slots))


def _which(new: Sequence[bytes], keys: Sequence[bytes]) -> bytes:
    """Return one byte per key: 1 if it is new. A key that is named twice is new once."""
    if len(new) == len(keys):
        return b"\1" * len(keys)
    left = dict.fromkeys(new, True)
    return bytes(left.pop(key, False) for key in keys)


def _which_are_known(keys: Sequence[bytes], are_new: bytes, partition: Partition) -> bytes:
    """Return one byte per key: 1 if memory has the block, or another engine is writing it."""
    if 0 not in are_new:
        return bytes(len(keys))
    here = (protocol.MEMORY, protocol.ARRIVING)
    pairs = zip(partition.locate(keys).codes, are_new, strict=True)
    return bytes(code in here and not is_new for code, is_new in pairs)
