"""Runs a node until a signal arrives, and the HTTP server of its control API beside it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import cast

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware

from kvtier.control.connection import HttpConnection
from kvtier.control.doorman import BACKLOG, Doorman, on_loop_error, raise_descriptor_limit
from kvtier.control.page import LiveView
from kvtier.core.errors import ConfigError
from kvtier.core.system.signals import ended_by_signals, ending_signals, signals_ignored
from kvtier.devices.cpu import CpuDevice
from kvtier.node.config import NodeConfig
from kvtier.node.server.control import NodeControl
from kvtier.node.server.http import control_app, reading_app
from kvtier.node.server.node import CacheNode
from kvtier.node.server.server import NodeServer, listen

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = (LOOPBACK, "localhost")
MAX_CONNECTIONS = 32
"""Connections to the control socket, and to its port, beyond which idle ones are closed."""
HEADER_S = 10.0
WRITE_S = 30.0
"""Longest time in which a request's header has to arrive, and parts of an answer to be read."""
CLOSE_WAIT_S = 5.0


def run_node(config: NodeConfig, on_ready: Callable[[int | None], object]) -> None:
    """Run a node until SIGTERM, SIGINT or SIGHUP, and close it.

    on_ready: called with the control API's TCP port as soon as engines can attach.

    Raises ``ConfigError`` if it can't start.
    """
    raise_descriptor_limit()
    with ended_by_signals() as ending:
        node = CacheNode(config, CpuDevice())
        try:
            if not ending.is_asked:
                # Less CPU time per message than asyncio's own loop.
                uvloop.run(_serve(node, on_ready))
        finally:
            with signals_ignored():
                node.close()
            logger.info("stopped")


async def _serve(node: CacheNode, on_ready: Callable[[int | None], object]) -> None:
    config = node.config
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in ending_signals():
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
        self._path = path
        self.port: int | None = None
        self._live: LiveView | None = None
        self._sockets = [listen(path)]
        self._doormen = [_doorman()]
        self._servers = [_server(control_app(node, control), self._doormen[0])]
        if port is not None:
            try:
                self._sockets.append(_loopback(port))
            except BaseException:
                self._close_sockets()
                raise
            self.port = self._sockets[-1].getsockname()[1]
            loopback = reading_app(node, control)
            self._live = loopback.state.live
            # So that a page from elsewhere can't read it by a name of its own (DNS rebinding).
            loopback.add_middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK_NAMES))
            self._doormen.append(_doorman())  # idle clients here keep nobody from the socket
            self._servers.append(_server(loopback, self._doormen[-1]))
        self._thread = Thread(target=self._run, name="kvtier node control", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        asyncio.get_running_loop().set_exception_handler(on_loop_error)
        tasks = [asyncio.create_task(self._sweep())]
        if self._live is not None:
            tasks.append(asyncio.create_task(self._live.watch()))
        pairs = zip(self._servers, self._sockets, strict=True)
        await asyncio.gather(*(server.serve(sockets=[own]) for server, own in pairs))
        for task in tasks:
            task.cancel()

    async def _sweep(self) -> None:
        while True:
            for doorman in self._doormen:
                doorman.sweep()
            await asyncio.sleep(self._doormen[0].tick_s)

    async def close(self) -> None:
        """Answer pending requests, and end."""
        for server in self._servers:
            server.should_exit = True
        await asyncio.to_thread(self._thread.join, CLOSE_WAIT_S)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for own in self._sockets:
            own.close()
        self._path.unlink(missing_ok=True)


def _doorman() -> Doorman:
    return Doorman(
        MAX_CONNECTIONS,
        HEADER_S,
        WRITE_S,
        lambda reason: logger.debug("control connection closed reason=%s", reason),
    )


def _server(app: FastAPI, doorman: Doorman) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app,
            # uvicorn calls this like a class, to create a protocol.
            http=cast(type[asyncio.Protocol], partial(HttpConnection, doorman=doorman)),
            backlog=BACKLOG,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(CLOSE_WAIT_S),
        )
    )


def _loopback(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((LOOPBACK, port))
        made.listen(MAX_CONNECTIONS)  # clients wait until the thread accepts them
    except OSError as error:
        made.close()
        raise ConfigError(
            f"control_port: can't listen on {LOOPBACK}:{port}: {error.strerror}; choose another "
            "port, or 0 for any free one"
        ) from error
    return made
