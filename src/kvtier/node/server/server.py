"""Serves a node on a Unix socket: accepts connections, and polls the partitions."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from kvtier.core.errors import ConfigError
from kvtier.node.server.connection import Connection
from kvtier.node.server.engines import AttachError, peer_of
from kvtier.node.server.memory import LockFile
from kvtier.node.server.node import CacheNode
from kvtier.node.server.registry import Registry

logger = logging.getLogger(__name__)

BUSY_S = 1e-3
IDLE_S = 0.25
"""Seconds between polls while something moves, and otherwise."""
REST_S = 0.1
"""Seconds without new connections after one could not be accepted."""


class NodeServer:
    """Listens for engines. One event loop owns it and the node.

    node: the node. path: of the socket; one left by a previous process is replaced.

    Raises:
        ConfigError: the socket can't be made, or another node listens there.
    """

    def __init__(self, node: CacheNode, path: Path) -> None:
        self.node = node
        self.registry = Registry(node)
        self.path = path
        self._wakes = asyncio.Event()
        self._connections: WeakSet[Connection] = WeakSet()
        self._lock = _lock(path)
        try:
            self._socket = listen(path)
        except BaseException:
            self._lock.release()
            raise

    async def serve(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        self.registry.wake = self._wakes.set
        self.node.on_end = lambda: loop.call_soon_threadsafe(self._wakes.set)
        loop.add_reader(self._socket, self._accept)
        opening = asyncio.create_task(self.registry.opener.open_kept())
        try:
            while True:
                self._wakes.clear()
                is_busy = self.node.poll()
                self.registry.changed()
                # asyncio.wait_for would lose a cancellation that comes together with a wake-up.
                with suppress(TimeoutError):
                    async with asyncio.timeout(BUSY_S if is_busy else IDLE_S):
                        await self._wakes.wait()
        finally:
            loop.remove_reader(self._socket)
            self.node.on_end = None
            opening.cancel()
            await self.registry.opener.close()
            for connection in list(self._connections):
                connection.close()
            self.registry.close()
            self.close()

    def close(self) -> None:
        """Close the socket of a server that does not serve, and remove it."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            self.path.unlink(missing_ok=True)
            self._lock.release()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptors are left: others may be closed soon
            logger.warning("a connection was refused: %s", error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            loop.call_later(REST_S, self._accept_again)
            return
        peer = None
        try:
            peer = peer_of(connection)
            self._connections.add(Connection(self.registry, connection, peer))
        except AttachError as error:
            logger.warning("a connection was refused: %s", error)
            connection.close()
            if peer is not None:
                peer.close()

    def _accept_again(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)


def _lock(path: Path) -> LockFile:
    """Return a lock file beside the socket."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return LockFile(path.with_name(f"{path.name}.lock"))
    except BlockingIOError:
        raise ConfigError(
            f"socket: another node listens at {path}; stop it, or name another path"
        ) from None
    except OSError as error:
        raise _no_socket(path, error) from error


def _no_socket(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"socket: {path} can't be made: {error.strerror or error}; name a path of at most 107 "
        "bytes in a directory that this user can write to"
    )


def listen(path: Path) -> socket.socket:
    """Return a listening socket at ``path``, for this user and group only."""
    if path.exists() and not path.is_socket():
        raise ConfigError(f"socket: {path} is no socket; name another path, or remove it")
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
        raise _no_socket(path, error) from error
    listener.setblocking(False)
    return listener
