"""Runs the server: socket, signals, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import cast

import uvicorn

from kvtier.control.doorman import BACKLOG, Doorman, on_loop_error
from kvtier.core.errors import ConfigError
from kvtier.core.system.signals import ending_signals
from kvtier.serve.engine import Engine
from kvtier.serve.server.app import make_app
from kvtier.serve.server.config import ServerConfig
from kvtier.serve.server.connection import ApiConnection
from kvtier.serve.server.listener import listen, url_of
from kvtier.serve.server.service import Service
from kvtier.serve.server.tls import Certificate, Handshake, open_certificate

logger = logging.getLogger(__name__)

PATIENCE_S = 5
"""Time after the grace period for the last bytes to reach their clients."""


QUEUE = 1024
"""Connections that the system queues until the event loop accepts them, ``BACKLOG`` at a time."""


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handling, which re-raises the signal to end the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """Serves an engine, which must be started and is not closed by this class.

    listeners: from ``bind``; the server closes them.
    Raises ``ConfigError`` for a certificate that cannot be used.
    """

    def __init__(
        self, engine: Engine, config: ServerConfig, listeners: Sequence[socket.socket]
    ) -> None:
        self._certificate = open_certificate(config)
        self.url = url_of(listeners[0], "https" if self._certificate else "http")
        self._engine = engine
        self._config = config
        self._listeners = list(listeners)
        self._loop: asyncio.AbstractEventLoop | None = None
        # Created here, bound to the loop of ``run`` by their first wait.
        self._stop = asyncio.Event()
        self._stop_at_once = asyncio.Event()

    def run(self, on_ready: Callable[[str], None], handle_signals: bool = False) -> None:
        """Serve until ``stop``; with ``handle_signals`` also until SIGTERM, SIGINT or SIGHUP.

        The first signal begins the shutdown, a second one cuts it short. Returns when the last
        request has its answer.

        on_ready: called with the URL as soon as clients can connect.
        Raises ``ConfigError`` if another process has taken the port meanwhile.
        """
        self._listen()
        asyncio.run(self._serve(on_ready, handle_signals))

    def _listen(self) -> None:
        for listener in self._listeners:
            listen(listener, QUEUE)

    def stop(self) -> None:
        """Begin the shutdown; a second call cuts it short. Thread-safe, while ``run`` runs."""
        assert self._loop is not None, "stop is for a server that runs"
        with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
            self._loop.call_soon_threadsafe(self._on_stop)

    def _on_stop(self) -> None:
        if self._stop.is_set():
            self._stop_at_once.set()
        else:
            logger.info("shutting down grace_s=%s", self._config.shutdown_grace_s)
            self._stop.set()

    async def _serve(self, on_ready: Callable[[str], None], handle_signals: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(on_loop_error)
        if handle_signals:
            for number in ending_signals():
                self._loop.add_signal_handler(number, self._on_stop)
        service = Service(self._engine, self._config)
        grace_s = self._config.shutdown_grace_s
        app = make_app(service)
        settings = uvicorn.Config(
            app,
            # uvicorn calls this like a class, to create a protocol.
            http=cast(type[asyncio.Protocol], self._protocol(service.doorman)),
            backlog=BACKLOG,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(grace_s) + PATIENCE_S,
        )
        server = _Uvicorn(settings)
        serving = asyncio.create_task(server.serve(sockets=self._listeners))
        watching = [
            asyncio.create_task(_watch(service.doorman, self._certificate)),
            asyncio.create_task(app.state.live.watch()),
        ]
        try:
            await _until(serving, lambda: server.started)
            self._listen()  # again: uvicorn has reduced the backlog
            on_ready(self.url)
            logger.info("serving url=%s model=%s", self.url, service.model_name)
            stop = asyncio.create_task(self._stop.wait())
            await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
            service.is_closing = True
            server.should_exit = True
            await self._finish(service, grace_s)
        finally:
            await serving
            for task in watching:
                task.cancel()
            service.doorman.dismiss()
            await asyncio.sleep(0)
            service.close()
            logger.info("stopped")

    def _protocol(self, doorman: Doorman) -> Callable[..., asyncio.Protocol]:
        if self._certificate is None:
            return partial(ApiConnection, doorman=doorman)
        timeout_s = self._config.write_timeout_s
        return partial(
            Handshake, doorman=doorman, certificate=self._certificate, timeout_s=timeout_s
        )

    async def _finish(self, service: Service, grace_s: float) -> None:
        """Wait for the requests in flight, until the grace period is over or ``stop`` comes."""
        hurry = asyncio.create_task(self._stop_at_once.wait())
        finish = asyncio.create_task(service.finish(grace_s))
        await asyncio.wait({hurry, finish}, return_when=asyncio.FIRST_COMPLETED)
        if not finish.done():
            service.cut_short()
        hurry.cancel()
        await finish


async def _watch(doorman: Doorman, certificate: Certificate | None) -> None:
    while True:
        await asyncio.sleep(doorman.tick_s)
        doorman.sweep()
        if certificate is not None:
            certificate.refresh()


async def _until(serving: asyncio.Task[None], is_ready: Callable[[], bool]) -> None:
    """Wait until the server listens. Raises its error if it cannot."""
    while not is_ready():
        if serving.done():
            serving.result()
            raise ConfigError("the server ended before it listened")
        await asyncio.sleep(0.005)
