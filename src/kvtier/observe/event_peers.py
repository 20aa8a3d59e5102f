"""Limits on the connections to the publisher's sockets: their number, and how far they lag.

ZeroMQ accepts every connection and buffers what a peer has not read. Its monitor reports each
connection's descriptor. A connection is ended by shutting its descriptor down; ZeroMQ then frees
its buffer.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

MAX_PEERS = 64
"""Maximum number of connections to one address."""
NUM_REFUSED = 64
"""Connections that ZeroMQ may have accepted beyond it before they are refused."""
MAX_BEHIND_BYTES = 16 << 20
"""A subscriber that lags by more than this is disconnected, which bounds the buffers."""
MAX_BEHIND_SNAPSHOTS_BYTES = 256 << 20
"""The same for a client of replays: bytes of snapshots that were sent to some client meanwhile."""
STUCK_S = 10.0
"""A replay client that reads nothing for this long is disconnected."""
SWEEP_S = 1.0
"""Interval at which connections are checked."""


@dataclass(slots=True)
class _Peer:
    """A connected reader of events.

    name: addresses of both ends.
    at_empty: bytes that had been sent to readers of its address when nothing was unsent.
    unsent: unsent bytes at the last check.
    since: when ``unsent`` changed last.
    """

    name: tuple[object, object]
    at_empty: int
    unsent: int = 0
    since: float = 0.0


@dataclass(slots=True)
class _Door:
    """Monitor of a socket, with its connections by descriptor. is_replay: it serves replays."""

    monitor: zmq.Socket[bytes]
    is_replay: bool
    peers: dict[int, _Peer] = field(default_factory=dict)


class EventPeers:
    """Watches the connections of some sockets on its own thread, from ``start`` to ``close``.

    published_bytes: total of all messages so far, updated by the publisher.
    snapshot_bytes: total of all snapshots so far, likewise.
    """

    def __init__(self) -> None:
        self.published_bytes = self.snapshot_bytes = 0
        self._sockets: list[zmq.Socket[bytes]] = []
        self._doors: list[_Door] = []
        self._thread = Thread(target=self._run, name="kvtier-events-peers", daemon=True)

    @property
    def max_descriptors(self) -> int:
        """Descriptors that all connections may use."""
        return len(self._doors) * (MAX_PEERS + NUM_REFUSED)

    def watch(self, watched: zmq.Socket[bytes], is_replay: bool) -> None:
        """Limit the connections of ``watched``, which is not bound yet."""
        import zmq

        told = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        monitor = watched.get_monitor_socket(zmq.Event(told))
        self._sockets.append(watched)
        self._doors.append(_Door(monitor, is_replay))

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread. No other thread may use the sockets meanwhile."""
        if self._thread.is_alive():
            for watched in self._sockets:
                watched.disable_monitor()
            self._thread.join()

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        doors = {door.monitor: door for door in self._doors}
        for monitor in doors:
            poller.register(monitor, zmq.POLLIN)
        swept = time.monotonic()
        while doors:
            for monitor, _ in poller.poll(int(SWEEP_S * 1000)):
                if not self._hear(doors[monitor]):
                    poller.unregister(monitor)
                    del doors[monitor]
            if time.monotonic() - swept >= SWEEP_S:
                swept = time.monotonic()
                for door in doors.values():
                    self._sweep(door, swept)

    def _hear(self, door: _Door) -> bool:
        """Handle one message of a monitor. Return False for its last one."""
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        told = recv_monitor_message(door.monitor)
        if told["event"] == zmq.EVENT_ACCEPTED:
            self._admit(door, told["value"])
        elif told["event"] == zmq.EVENT_DISCONNECTED:
            door.peers.pop(told["value"], None)
        return bool(told["event"] != zmq.EVENT_MONITOR_STOPPED)

    def _admit(self, door: _Door, descriptor: int) -> None:
        with suppress(OSError), _borrowed(descriptor) as connection:
            name = _name(connection)
            if len(door.peers) >= MAX_PEERS and descriptor not in door.peers:
                connection.shutdown(socket.SHUT_RDWR)
                logger.warning(
                    "events: connection refused, there are too many max=%d replay=%s",
                    MAX_PEERS,
                    door.is_replay,
                )
            else:
                door.peers[descriptor] = _Peer(name, self._sent_bytes(door))

    def _sweep(self, door: _Door, now: float) -> None:
        for descriptor, peer in list(door.peers.items()):
            try:
                with _borrowed(descriptor) as connection:
                    if _name(connection) != peer.name:
                        raise OSError("another connection has its descriptor")
                    if self._is_behind(door, peer, _unsent_bytes(connection), now):
                        connection.shutdown(socket.SHUT_RDWR)
                        logger.warning(
                            "events: a reader is disconnected, it takes too little replay=%s",
                            door.is_replay,
                        )
            except OSError:  # it was closed
                door.peers.pop(descriptor, None)

    def _is_behind(self, door: _Door, peer: _Peer, unsent: int, now: float) -> bool:
        if not unsent or unsent != peer.unsent:
            peer.unsent, peer.since = unsent, now
        sent_bytes = self._sent_bytes(door)
        if not unsent:
            peer.at_empty = sent_bytes
        if door.is_replay and now - peer.since >= STUCK_S and unsent > 0:
            return True
        most = MAX_BEHIND_SNAPSHOTS_BYTES if door.is_replay else MAX_BEHIND_BYTES
        return sent_bytes - peer.at_empty > most

    def _sent_bytes(self, door: _Door) -> int:
        return self.snapshot_bytes if door.is_replay else self.published_bytes


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Yield a duplicate of a descriptor of ZeroMQ, which may close its own at any time.

    Raises ``OSError`` if it has. Compare ``_name`` to recognise a reused descriptor.
    """
    own = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    with connection:
        yield connection


def _name(connection: socket.socket) -> tuple[object, object]:
    return connection.getsockname(), connection.getpeername()


def _unsent_bytes(connection: socket.socket) -> int:
    """Return the bytes that the other end has not taken yet."""
    found = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    return int(struct.unpack("i", found)[0])
