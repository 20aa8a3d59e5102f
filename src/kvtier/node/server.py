"""Serves a node on a Unix socket: accepts connections, and polls the rooms."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.node.connection import Connection, Registry
from kvtier.node.engines import AttachError, peer_of
from kvtier.node.node import CacheNode

logger = logging.getLogger(__name__)

BUSY_S = 1e-3
IDLE_S = 0.25
"""Seconds between polls while something moves, and otherwise."""


class NodeServer:
    """Listens for engines. One event loop owns it and the node.

    node: the node. path: of the socket; a socket of an earlier node is replaced.

    Raises:
        ConfigError: the socket can't be made.
    """

    def __init__(self, node: CacheNode, path: Path) -> None:
        self.node = node
        self.registry = Registry(node)
        self.path = path
        self._wakes = asyncio.Event()
        self._socket = listen(path)

    async def serve(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        self.registry.wake = self._wakes.set
        self.node.on_end = lambda: loop.call_soon_threadsafe(self._wakes.set)
        loop.add_reader(self._socket, self._accept)
        try:
            while True:
                self._wakes.clear()
                is_busy = self.node.poll()
                self.registry.changed()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wakes.wait(), BUSY_S if is_busy else IDLE_S)
        finally:
            loop.remove_reader(self._socket)
            self.node.on_end = None
            self._socket.close()
            self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            logger.warning("a connection was refused: %s", error.strerror)
            return
        try:
            peer = peer_of(connection)
        except AttachError as error:
            logger.warning("a connection was refused: %s", error)
            connection.close()
            return
        Connection(self.registry, connection, peer)


def listen(path: Path) -> socket.socket:
    """Return a listening socket at ``path``, for this user and group only."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        mask = os.umask(0o117)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"socket: {path} can't be made: {error.strerror or error}; name a path of at most 107 "
            "bytes in a directory that this user can write to"
        ) from error
    listener.setblocking(False)
    return listener
