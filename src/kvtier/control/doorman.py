"""Limits on connections: their number, their time limits, and which one is closed for a new one."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import resource
import time
from collections.abc import Callable
from typing import Any, Protocol

from kvtier.core.errors import ConfigError
from kvtier.observe.live.files import PATHS

logger = logging.getLogger(__name__)

NUM_RESERVED = 64
"""Connections beyond the limit that only serve ``MONITOR_PATHS``."""
MONITOR_PATHS = frozenset({"/health", "/metrics"}) | PATHS
"""Paths served on reserved connections, including the live page, which is needed during
overload."""
BACKLOG = 16
"""Connections that the event loop accepts per iteration."""
NUM_UNKNOWN = 5 * BACKLOG
"""Connections that are open but not known to the doorman: a connection is accepted in one iteration
of the event loop, gets its transport in the next and reaches the doorman in the third; what that
closes is closed in the fourth."""
NUM_SPARE_FILES = 64
"""Open files reserved for the rest of the process."""


class Peer(Protocol):
    """A connection, from the doorman's view."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes written for the client that it has not read yet."""

    def abort(self) -> None:
        """Close at once."""


class Doorman:
    """Tracks every connection of a server. Belongs to the event loop's thread.

    A connection is idle until it has sent a whole header, and again after each answer. If there are
    too many, the one that has been idle longest is closed, so that idle connections cannot block
    others. A connection with a request is never closed in favour of another.

    on_close: called with the reason for each connection that the doorman closes.
    now: clock, seconds.
    """

    def __init__(
        self,
        max_connections: int,
        header_timeout_s: float,
        write_timeout_s: float,
        on_close: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max = max_connections
        self._header_timeout_s = header_timeout_s
        self._write_timeout_s = write_timeout_s
        self._on_close = on_close
        self._now = now
        self._all: set[Peer] = set()
        self._waiting: dict[Peer, float] = {}  # idle since; the longest first
        self._unread: dict[Peer, tuple[int, float]] = {}  # unsent bytes, unchanged since

    @property
    def header_timeout_s(self) -> float:
        """Time limit for a connection to send a whole header."""
        return self._header_timeout_s

    @property
    def tick_s(self) -> float:
        """Interval of calls to ``sweep``."""
        return min(1.0, self._header_timeout_s / 4, self._write_timeout_s / 4)

    def came(self, client: Peer) -> None:
        """Note a new connection; drop an idle one if there are too many."""
        self._all.add(client)
        self.waits(client)
        if len(self._all) > self._max + NUM_RESERVED:
            self._drop_idle()

    def waits(self, client: Peer) -> None:
        """Note that a connection is idle: it is new, or was answered."""
        self._waiting.pop(client, None)
        if client in self._all:
            self._waiting[client] = self._now()

    def asks(self, client: Peer) -> None:
        """Note that a whole request header has arrived."""
        self._waiting.pop(client, None)

    def left(self, client: Peer) -> None:
        self._all.discard(client)
        self._waiting.pop(client, None)
        self._unread.pop(client, None)

    def note(self, reason: str) -> None:
        """Count a connection that is being closed because of another protocol."""
        self._on_close(reason)

    def dismiss(self) -> None:
        """Close all remaining connections; unsent data is lost."""
        for client in list(self._all):
            self.left(client)
            client.abort()

    def make_room(self) -> bool:
        """Return whether a connection with a request may stay; may close idle ones for it."""
        while len(self._all) > self._max:
            if not self._drop_idle():
                return False
        return True

    def sweep(self) -> None:
        """Close connections that exceeded a time limit: for their header, or for reading."""
        now = self._now()
        late = [
            client
            for client, since in self._waiting.items()
            if now - since >= self._header_timeout_s and not client.unsent_bytes
        ]
        for client in late:
            self._close(client, "header_timeout")
        for client in list(self._all):
            self._check_reads(client, now)

    def _check_reads(self, client: Peer, now: float) -> None:
        unsent = client.unsent_bytes
        seen, since = self._unread.get(client, (0, now))
        if not unsent:
            self._unread.pop(client, None)
        elif unsent != seen:
            self._unread[client] = (unsent, now)
        elif now - since >= self._write_timeout_s:
            self._close(client, "write_timeout")

    def _drop_idle(self) -> bool:
        """Close the connection that has been idle longest and has no unsent data."""
        idle = next((each for each in self._waiting if not each.unsent_bytes), None)
        if idle is not None:
            self._close(idle, "room")
        return idle is not None

    def _close(self, client: Peer, reason: str) -> None:
        self.left(client)
        self._on_close(reason)
        client.abort()


def raise_descriptor_limit() -> None:
    """Raise this process's open-file limit to the system's maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def room_for_connections(num_others: int = 0) -> float:
    """Return how many connections this process may open beside its files.

    num_others: descriptors reserved for connections to other addresses, such as the events'.
    Raises ``ConfigError`` if those are too few for a server.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return math.inf
    num_open = len(os.listdir("/proc/self/fd"))
    room = limit - num_open - NUM_UNKNOWN - NUM_SPARE_FILES - NUM_RESERVED
    room -= num_others
    if room < 1:
        raise ConfigError(
            f"max_connections: this process may open {limit} files, too few for a server; raise "
            "the limit (ulimit -n)"
        )
    return room


def possible_connections(wanted: int, num_others: int = 0) -> int:
    """Return ``wanted``, or fewer if the open-file limit is lower.

    num_others: see ``room_for_connections``.
    """
    room = room_for_connections(num_others)
    if room < wanted:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        logger.warning("connections limited max=%d wanted=%d open_files=%d", room, wanted, limit)
    return int(min(room, wanted))


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log in one line that no connection could be accepted; asyncio retries by itself."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        logger.error("connections not accepted error=%s", error.strerror)
    else:
        loop.default_exception_handler(context)
