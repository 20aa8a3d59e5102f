"""Engines that are attached to a node: their processes, and the slots that they use.

A slot that an engine uses is taken back when the engine says so, or when every client of the engine
has ended: its connections are closed, and it has said goodbye or its process is dead. Never by
time, since a stopped process that resumes would write over another's block.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from kvtier.errors import CacheError
from kvtier.keyed.cache import Reserved
from kvtier.node.protocol import Int64s
from kvtier.node.room import NodeRoom
from kvtier.node.users import SlotUser
from kvtier.types import BlockId, Slot

SO_PEERPIDFD = 77
"""Socket option for the process descriptor of the peer (Linux 6.5)."""
CREDENTIALS = struct.Struct("3i")


class AttachError(CacheError):
    """A process may not attach."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """The process at the other end of a Unix socket.

    pid: in the node's process namespace. uid: user. pidfd: becomes readable when the process ends.
    identity: numbers that no other living process has, as far as the kernel tells them.
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
    """Slots of one room that one engine uses.

    Args:
        room: the room.
        user: the engine, as the next node will find it.

    Attributes:
        num_leases: uint32 [num_slots], how many leases the engine has of each slot. Its pages cost
            memory once a slot in them was leased.
        reserved: by slot, its key.
    """

    def __init__(self, room: NodeRoom, user: SlotUser) -> None:
        self.room = room
        self._users = room.tier.users
        self._mask, self._keeps = np.uint64(user.mask), np.uint64(user.keeps)
        self.num_leases = np.zeros(room.tier.num_slots, np.uint32)
        self.reserved: dict[Slot, bytes] = {}

    def lease(self, blocks: Sequence[BlockId]) -> Int64s:
        """Lease blocks that are in memory, once more. Return their slots."""
        slots = self.room.lease(blocks)
        self._users[slots] |= self._mask
        if _are_distinct(np.sort(slots)):
            self.num_leases[slots] += 1
        else:
            np.add.at(self.num_leases, slots, 1)
        return slots

    def release(self, slots: Int64s) -> None:
        """Release one lease of each slot. Slots that the engine has not leased are ignored."""
        ordered = np.sort(slots)
        if len(ordered) and (ordered[0] < 0 or ordered[-1] >= len(self.num_leases)):
            self.release(slots[(slots >= 0) & (slots < len(self.num_leases))])
            return
        if _are_distinct(ordered) and self.num_leases[slots].all():
            self.num_leases[slots] -= 1
        else:
            at, num = np.unique(slots, return_counts=True)
            ours = np.minimum(num.astype(np.uint32), self.num_leases[at])
            self.num_leases[at] -= ours
            slots = np.repeat(at, ours)
        if len(slots):
            over = slots[self.num_leases[slots] == 0]
            self._users[over] &= self._keeps
            self.room.end_leases(slots)

    def reserve(self, keys: Sequence[bytes]) -> Reserved | None:
        """Reserve slots for new blocks; see ``KeyedCache.reserve``."""
        reserved = self.room.reserve(keys)
        if reserved is not None:
            self._users[np.asarray(reserved.slots, np.int64)] |= self._mask
            self.reserved.update(zip(reserved.slots, reserved.keys, strict=True))
        return reserved

    def commit(self, slots: Sequence[Slot], depths: Sequence[int], to_storage: bool) -> None:
        """Note that reserved slots have been written. Others are ignored."""
        mine = [
            (slot, self.reserved.pop(slot), depth)
            for slot, depth in zip(slots, depths, strict=True)
            if slot in self.reserved
        ]
        if mine:
            self._users[np.array([slot for slot, _, _ in mine])] &= self._keeps
            self.room.commit([key for _, key, _ in mine], [at for _, _, at in mine], to_storage)

    def abort(self, slots: Iterable[Slot]) -> None:
        """Give up reserved slots. Others are ignored."""
        keys = [self.reserved.pop(slot) for slot in slots if slot in self.reserved]
        if keys:
            self.room.abort(keys)

    def distrust(self, slots: Iterable[Slot]) -> None:
        """Give up the blocks in slots that this engine uses. Others are ignored."""
        mine = [slot for slot in slots if slot in self.reserved or self._is_leased(slot)]
        self.room.distrust(mine)

    def _is_leased(self, slot: Slot) -> bool:
        return 0 <= slot < len(self.num_leases) and bool(self.num_leases[slot])

    def end(self) -> None:
        """Release and give up everything."""
        self.abort(list(self.reserved))
        leased = np.flatnonzero(self.num_leases)
        self.release(np.repeat(leased, self.num_leases[leased]))

    @property
    def num_slots(self) -> int:
        """Number of slots in use."""
        return int(np.count_nonzero(self.num_leases)) + len(self.reserved)


def _are_distinct(ordered: Int64s) -> bool:
    """Whether no slot is named twice, as in nearly all messages. ordered: ascending."""
    return bool((ordered[1:] != ordered[:-1]).all())


@dataclass(slots=True)
class AttachedClient:
    """One client of an engine: a process that has mapped the memory, or a part of one.

    process: the process. number: see ``SlotUsers``. connections: numbers of those that are open. A
    client without any is kept until its process ends, since it may still use slots.
    """

    process: EngineProcess
    number: int
    connections: set[int] = field(default_factory=set)


@dataclass(slots=True)
class AttachedEngine:
    """One engine, of one or several clients.

    name, uid: the same in all of its processes. tenant: whose quota counts. user: what the next
    node will know of it. clients: by name, those that are not known to have ended. rooms: by room
    number, what it uses there.
    """

    name: str
    uid: int
    tenant: str
    user: SlotUser
    clients: dict[str, AttachedClient] = field(default_factory=dict)
    rooms: dict[int, Holdings] = field(default_factory=dict)

    def holdings(self, number: int, room: NodeRoom) -> Holdings:
        """Return what the engine uses of a room."""
        held = self.rooms.get(number)
        if held is None:
            held = self.rooms[number] = Holdings(room, self.user)
        return held

    def end(self) -> None:
        """Take everything back. No process of the engine may live."""
        for holdings in self.rooms.values():
            holdings.end()
        self.rooms.clear()

    @property
    def num_slots(self) -> int:
        """Number of slots in use."""
        return sum(each.num_slots for each in self.rooms.values())
