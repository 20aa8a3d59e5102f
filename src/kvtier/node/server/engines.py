"""Engines that are attached to a node: their processes, and the slots that they use.

A slot that an engine uses is taken back when the engine releases it, or when every client of the
engine has ended: its connections are closed, and it has detached or its process is dead. There is
no timeout, since a stopped process that resumes would overwrite another's block.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from kvtier.cache.block_cache import Reserved
from kvtier.core.errors import CacheError
from kvtier.core.types import BlockId
from kvtier.index.selection import Int64s, as_array, as_numbers
from kvtier.index.slot_leases import Segments
from kvtier.node.server.partition import Partition
from kvtier.node.server.users import SlotUser
from kvtier.node.wire.frame_socket import FrameSocket
from kvtier.node.wire.protocol import CostsNotice, Turns, pack, turns_of

SO_PEERPIDFD = 77
"""Socket option for the process descriptor of the peer (Linux 6.5)."""
NAME = slice(1, 5)
"""Place in a message of its name's length and first letters; of one that ``serve`` serves."""
RESERVE, COMMIT = b"\xaeRes", b"\xacCom"
CREDENTIALS = struct.Struct("3i")


class AttachError(CacheError):
    """A process may not attach."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """The process at the other end of a Unix socket.

    Attributes:
        pid: in the node's process namespace.
        uid: user.
        pidfd: becomes readable when the process ends.
        identity: numbers that no other living process has, as far as the kernel provides them.
    """

    pid: int
    uid: int
    pidfd: int
    identity: tuple[int, int]

    def copy(self) -> EngineProcess:
        """Return the process with a descriptor of its own."""
        return replace(self, pidfd=os.dup(self.pidfd))

    @property
    def has_ended(self) -> bool:
        """Whether the process is dead."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the process descriptor."""
        with suppress(OSError):
            os.close(self.pidfd)


def peer_of(connection: socket.socket) -> EngineProcess:
    """Return the process at the other end of a connection.

    Raises ``AttachError`` if the node could not notice the end of that process.
    """
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(told)
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        if not pid:
            raise AttachError(
                "the process is in another process namespace, so the node can't notice its end; "
                "start it with the node's (hostPID, or --pid=host), or use Linux 6.5 or newer"
            ) from None
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise AttachError(f"process {pid} can't be watched: {error.strerror}") from None
    return EngineProcess(pid, uid, pidfd, (pid, os.fstat(pidfd).st_ino))


class Holdings:
    """Slots of one partition that one engine uses.

    Pages of the arrays cost memory once a slot in them was used.

    Args:
        partition: the partition.
        user: the engine, as the next node will find it.

    Attributes:
        num_leases: uint32 [num_slots], how many leases the engine has of each slot.
        is_reserved: bool [num_slots], whether the engine is to fill each slot.
        num_reserved: number of reserved slots.
    """

    def __init__(self, partition: Partition, user: SlotUser) -> None:
        self.partition = partition
        self.num_leases = np.zeros(partition.tier.num_slots, np.uint32)
        self.is_reserved = np.zeros(partition.tier.num_slots, bool)
        self._leases = partition.slot_leases(user, self.num_leases, self.is_reserved)
        self._key_bytes, self._is_alone = partition.key.key_bytes, not partition.cache.storages
        self.num_reserved = 0
        self._segments: Sequence[int] = ()  # whose slots are taken by ``_serve_reserve``

    def lease(self, blocks: Sequence[BlockId]) -> tuple[bytes, bytes]:
        """Lease blocks that are in memory, once more.

        Returns their slots and generations, as ``protocol.pack`` has them.
        """
        return self._leases.lease(blocks, self.partition.clock())

    def serve(self, content: memoryview, number: int) -> tuple[bytes, bool] | None:
        """Serve a simple message on this partition in one call; see ``SlotLeases.serve``.

        number: of this partition. Returns the frame of the answer, b"" for none, and whether it
        counts as a look-up. None if the message is to be served otherwise.
        """
        its = self.partition
        if its.cache.is_doubtful:
            return None
        name = content[NAME]
        if name == RESERVE:
            frame = self._serve_reserve(content, number)
            return None if frame is None else (frame, False)
        if name == COMMIT:
            return (b"", False) if self._serve_commit(content, number) else None
        is_alone = self._is_alone and not its.reservations.has_overdue()
        served = self._leases.serve(content, number, self._key_bytes, is_alone, its.clock())
        if served is None:
            return None
        answer, looked_up, ended = served
        if looked_up:
            its.looked_up.add(looked_up)
        if ended:
            its.note_released(ended)
        return answer, bool(looked_up)

    def _serve_reserve(self, content: memoryview, number: int) -> bytes | None:
        """Reserve slots for new blocks, if all are admitted; return the frame of the answer."""
        its = self.partition
        served = self._leases.serve_reserve(
            content,
            number,
            self._key_bytes,
            self._segments_for(len(content) // self._key_bytes),
            self._make_room,
            its.sample_mask,
            its.reservations.has_overdue(),
            its.clock(),
        )
        if served is None:
            return None
        frame, blocks, slots, generations, hashes, sampled = served
        its.tier.note_taken(self._segments, len(blocks))
        its.note_reserved(blocks, hashes, sampled)
        self.num_reserved += len(blocks)
        its.reservations.add(self.is_reserved, slots, generations)
        return frame

    def _segments_for(self, num_blocks: int) -> Segments:
        tier = self.partition.tier
        self._segments = tier.segments_for(num_blocks)
        return tier.free_slots(self._segments)

    def _make_room(self, num_new: int, ready: Sequence[BlockId]) -> Segments | None:
        """Free slots for new blocks, if all are admitted; see ``SlotLeases.serve_reserve``."""
        self.partition.cache.make_room(num_new, ready, self._leases.admits)
        has_room = num_new <= self.partition.tier.num_free
        return self._segments_for(num_new) if has_room else None

    def _serve_commit(self, content: memoryview, number: int) -> bool:
        its = self.partition
        served = None if its.cache.has_waiters else self._leases.serve_commit(content, number)
        if served is None:
            return False
        blocks, slots, generations, depths, keys, to_storage = served
        if blocks:
            self.num_reserved -= len(blocks)
            its.reservations.end_whole(slots, generations)
            its.note_committed(blocks, slots, generations, depths, keys, to_storage)
        return True

    def release(self, slots: Int64s) -> None:
        """Release one lease of each slot. Slots that the engine has not leased are ignored."""
        self.partition.note_released(self._leases.release(slots))

    def reserve(self, keys: Sequence[bytes]) -> tuple[Reserved, bytes] | None:
        """Reserve slots for new blocks; see ``BlockCache.reserve``.

        Returns also the slots' generations, as ``protocol.pack`` has them.
        """
        reserved = self.partition.reserve(keys)
        if reserved is None:
            return None
        self.num_reserved += len(reserved.slots)
        generations = self._leases.reserve(reserved.slots)
        self.partition.reservations.add(self.is_reserved, pack(reserved.slots), generations)
        return reserved, generations

    def commit(self, slots: Int64s, depths: Int64s, to_storage: bool) -> None:
        """Note that reserved slots have been written. Others are ignored.

        depths: int64 [num_slots], position of each block in its prompt.
        """
        which, blocks = self._end_reserved(slots)
        if blocks:
            its = depths if len(which) == len(depths) else depths[as_array(which)]
            self.partition.cache.commit_blocks(blocks, as_numbers(its), to_storage)

    def abort(self, slots: Int64s) -> None:
        """Give up reserved slots. Others are ignored."""
        _, blocks = self._end_reserved(slots)
        if blocks:
            self.partition.cache.abort_blocks(blocks)

    def _end_reserved(self, slots: Int64s) -> tuple[Sequence[int], Sequence[BlockId]]:
        which, blocks = self._leases.end_reserved(slots)
        self.num_reserved -= len(blocks)
        self.partition.reservations.end(slots[as_array(which)])
        return which, blocks

    def distrust(self, slots: Int64s) -> Turns:
        """Give up the blocks in slots that this engine uses. Others are ignored."""
        for at in turns_of(len(slots)):
            some = np.unique(slots[at])
            some = some[(some >= 0) & (some < len(self.num_leases))]
            self.partition.distrust_slots(
                some[self.is_reserved[some] | (self.num_leases[some] > 0)]
            )
            yield

    def end(self) -> Turns:
        """Release and give up everything."""
        reserved = np.flatnonzero(self.is_reserved)
        for at in turns_of(len(reserved)):
            self.abort(reserved[at])
            yield
        leased = np.flatnonzero(self.num_leases)
        for at in turns_of(len(leased)):
            some = leased[at]
            while len(some := some[self.num_leases[some] > 0]):
                self.release(some)
                yield

    @property
    def num_slots(self) -> int:
        """Number of slots in use."""
        return int(np.count_nonzero(self.num_leases)) + self.num_reserved


@dataclass(slots=True)
class AttachedClient:
    """One client of an engine: a process that has mapped the memory, or a part of one.

    Attributes:
        process: the process.
        number: see ``SlotUsers``.
        connections: open connections by number. A client without any is kept until its process
            ends, since it may still use slots.
        has_left: whether it has detached, and closed its end of all connections.
    """

    process: EngineProcess
    number: int
    connections: dict[int, FrameSocket] = field(default_factory=dict)
    has_left: bool = False


@dataclass(slots=True)
class AttachedEngine:
    """One engine, of one or several clients.

    Attributes:
        name: the same in all of its processes.
        uid: user, the same in all of its processes.
        tenant: whose quota counts.
        user: identification of the engine that the next node process will find.
        clients: clients by name, until they are known to have ended.
        partitions: slots that it uses, by the partition's number.
        costs: what it has measured, by the partition's number.
        title: its name for display, with model and port; "" if it has none.
        num_waiting: its requests that wait.
        num_failures: sum over its ``ReportNotice``.
        num_pauses: sum over its ``ReportNotice``.
    """

    name: str
    uid: int
    tenant: str
    user: SlotUser
    clients: dict[str, AttachedClient] = field(default_factory=dict)
    partitions: dict[int, Holdings] = field(default_factory=dict)
    costs: dict[int, CostsNotice] = field(default_factory=dict)
    title: str = ""
    num_waiting: int = 0
    num_failures: int = 0
    num_pauses: int = 0

    def holdings(self, number: int, partition: Partition) -> Holdings:
        """Return what the engine uses of a partition."""
        held = self.partitions.get(number)
        if held is None:
            held = self.partitions[number] = Holdings(partition, self.user)
        return held

    def end(self) -> Turns:
        """Take everything back. No process of the engine may live."""
        for holdings in self.partitions.values():
            yield from holdings.end()
        self.partitions.clear()

    @property
    def num_slots(self) -> int:
        """Number of slots in use."""
        return sum(partition.num_slots for partition in self.partitions.values())
