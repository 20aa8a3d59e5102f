"""Runs a node until a signal arrives, and the HTTP server of its control API beside it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware

from kvtier.devices.cpu import CpuDevice
from kvtier.errors import ConfigError
from kvtier.node.config import NodeConfig
from kvtier.node.control import LoopCalls, NodeControl
from kvtier.node.http import control_app, reading_app
from kvtier.node.node import CacheNode
from kvtier.node.server import NodeServer, listen

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = (LOOPBACK, "localhost")
MOST_CONNECTIONS = 64
CLOSE_WAIT_S = 5.0


def run_node(config: NodeConfig, on_ready: Callable[[int | None], object]) -> None:
    """Run a node until SIGTERM or SIGINT, and close it.

    on_ready: called with the control API's TCP port as soon as engines can attach.

    Raises ``ConfigError`` if it can't start.
    """
    node = CacheNode(config, CpuDevice())
    try:
        uvloop.run(_serve(node, on_ready))  # less CPU time per message than asyncio's own loop
    finally:
        node.close()
        logger.info("stopped")


async def _serve(node: CacheNode, on_ready: Callable[[int | None], object]) -> None:
    config = node.config
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = NodeServer(node, config.socket)
    serving = asyncio.create_task(server.serve())
    try:
        control = ControlServer(
            node, NodeControl(server.registry), config.control_socket, config.control_port
        )
        try:
            on_ready(control.port)
            ends = asyncio.create_task(stop.wait())
            await asyncio.wait({serving, ends}, return_when=asyncio.FIRST_COMPLETED)
            ends.cancel()
        finally:
            await control.close()
    finally:
        if serving.done():
            serving.result()  # its error
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


class ControlServer:
    """Serves the control API of a node, on a thread of its own.

    Create it on the thread of the node's event loop, in its loop.

    Args:
        node: the node.
        control: carries the requests out.
        path: of the Unix socket.
        port: TCP port of the loopback address for what changes nothing; 0 for any, None for none.

    Attributes:
        port: the TCP port.

    Raises:
        ConfigError: a socket can't be made.
    """

    def __init__(self, node: CacheNode, control: NodeControl, path: Path, port: int | None) -> None:
        call = LoopCalls(asyncio.get_running_loop())
        self._path = path
        self.port: int | None = None
        self._sockets = [listen(path)]
        self._servers = [_server(control_app(node, control, call))]
        if port is not None:
            try:
                self._sockets.append(_loopback(port))
            except BaseException:
                self._close_sockets()
                raise
            self.port = self._sockets[-1].getsockname()[1]
            loopback = reading_app(node, control, call)
            # So that a page from elsewhere can't read it by a name of its own (DNS rebinding).
            loopback.add_middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK_NAMES))
            self._servers.append(_server(loopback))
        self._thread = Thread(target=self._run, name="kvtier node control", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        pairs = zip(self._servers, self._sockets, strict=True)
        await asyncio.gather(*(server.serve(sockets=[own]) for server, own in pairs))

    async def close(self) -> None:
        """Answer what was asked, and end."""
        for server in self._servers:
            server.should_exit = True
        await asyncio.to_thread(self._thread.join, CLOSE_WAIT_S)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for own in self._sockets:
            own.close()
        self._path.unlink(missing_ok=True)


def _server(app: FastAPI) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=int(CLOSE_WAIT_S),
        )
    )


def _loopback(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((LOOPBACK, port))
        made.listen(MOST_CONNECTIONS)  # clients wait until the thread accepts them
    except OSError as error:
        made.close()
        raise ConfigError(
            f"control_port: can't listen on {LOOPBACK}:{port}: {error.strerror}; choose another "
            "port, or 0 for any free one"
        ) from error
    return made
