"""TLS: the certificate, and the handshake of new connections.

The server does the handshake itself, not asyncio. So the doorman knows a connection from its first
moment, and an unfinished handshake costs no more than an unfinished header.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from kvtier.control.doorman import Doorman
from kvtier.core.errors import ConfigError
from kvtier.core.system.private_files import read_key_file
from kvtier.core.system.user_paths import user_path
from kvtier.serve.server.config import ServerConfig
from kvtier.serve.server.connection import ApiConnection

logger = logging.getLogger(__name__)

_Seen = tuple[tuple[int, int, int], ...]


class Certificate:
    """The server's certificate and key, reloaded when their files change.

    keyfile: None if both are in one file.
    Raises ``ConfigError`` if they cannot be used. If reloaded files cannot be used, the old ones
    stay in use, and the files are retried when they change again.
    """

    def __init__(self, certfile: str, keyfile: str | None) -> None:
        self._certfile = user_path(certfile)
        self._keyfile = None if keyfile is None else user_path(keyfile)
        self._seen = self._look()
        self._context = self._read()

    @property
    def context(self) -> ssl.SSLContext:
        """Context for new connections; open ones keep theirs."""
        return self._context

    def refresh(self) -> None:
        """Reload the files if they have changed."""
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._context = self._read()
        except ConfigError as error:
            # It may be half written, or the key may be replaced next.
            logger.warning("certificate not replaced error=%s", error)
        else:
            logger.info("certificate replaced file=%s", self._certfile)

    def _look(self) -> _Seen:
        """Return the identity of the files; () while one is missing."""
        paths = [self._certfile, *([] if self._keyfile is None else [self._keyfile])]
        try:
            found = [path.stat() for path in paths]
        except OSError:
            return ()
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        _must_be_readable("ssl_certfile", self._certfile, is_public=self._keyfile is not None)
        if self._keyfile is not None:
            _must_be_readable("ssl_keyfile", self._keyfile)
        try:
            context.load_cert_chain(self._certfile, self._keyfile, password=_no_password)
        except ssl.SSLError as error:
            raise ConfigError(
                f"ssl_certfile: {self._certfile} and its key can't be used: {_reason(error)}; give "
                "a certificate and the key that belongs to it, both in PEM"
            ) from error
        except _Encrypted as error:
            raise ConfigError(
                f"ssl_keyfile: {self._keyfile or self._certfile} is encrypted, and nobody is there "
                "to type its password; give one that is not, readable by this user only"
            ) from error
        return context


def open_certificate(config: ServerConfig) -> Certificate | None:
    """Return the certificate of ``config``; None for plain HTTP."""
    if config.ssl_certfile is None:
        return None
    return Certificate(config.ssl_certfile, config.ssl_keyfile)


class _Encrypted(Exception):  # noqa: N818 - what was found, not what failed
    pass


def _no_password() -> str:
    """Raise instead of letting OpenSSL ask at the terminal."""
    raise _Encrypted


def _must_be_readable(name: str, path: Path, is_public: bool = False) -> None:
    try:
        read_key_file(path, is_public)
    except OSError as error:
        raise ConfigError(
            f"{name}: can't read {path}: {error.strerror}; give a file in PEM"
        ) from error


def _reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason as words."""
    return (error.reason or "no PEM").lower().replace("_", " ")


class Handshake(asyncio.Protocol):
    """A connection until it is encrypted; then ``ApiConnection`` takes over.

    config, server_state, app_state: uvicorn's, for the ``ApiConnection``.
    timeout_s: limit for the last bytes of a connection that is being closed.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        doorman: Doorman,
        certificate: Certificate,
        timeout_s: float,
    ) -> None:
        self._doorman = doorman
        self._certificate = certificate
        self._timeout_s = timeout_s
        self._connect: Callable[[asyncio.Transport], ApiConnection] = lambda raw: ApiConnection(
            config, server_state, app_state, _loop, doorman=doorman, raw=raw
        )
        self._early = bytearray()
        self._task: asyncio.Task[None] | None = None

    @property
    def unsent_bytes(self) -> int:
        """0: the data of a handshake fits into the system's buffers."""
        return 0

    def abort(self) -> None:
        """Close at once."""
        self._raw.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._raw = transport
        # Nothing may be read before the TLS protocol is set.
        transport.pause_reading()
        self._doorman.came(self)
        self._task = asyncio.get_running_loop().create_task(self._agree())

    def data_received(self, data: bytes) -> None:
        """Keep data of the first request that shares a packet with the end of the handshake."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._doorman.left(self)

    async def _agree(self) -> None:
        encrypted = await self._encrypted()
        self._doorman.left(self)
        if encrypted is None or encrypted.is_closing():
            self._raw.abort()
            return
        connection = self._connect(self._raw)
        encrypted.set_protocol(connection)
        connection.connection_made(encrypted)
        if self._early:
            connection.data_received(bytes(self._early))

    async def _encrypted(self) -> asyncio.Transport | None:
        """Return the encrypted transport; None if the handshake failed or the client left."""
        if self._raw.is_closing():
            return None
        try:
            # The doorman's time limit applies: the loop's own must not end before it.
            return await asyncio.get_running_loop().start_tls(
                self._raw,
                self,
                self._certificate.context,
                server_side=True,
                ssl_handshake_timeout=2 * self._doorman.header_timeout_s,
                ssl_shutdown_timeout=self._timeout_s,
            )
        except ssl.SSLError:
            self._doorman.note("tls")
        except OSError:  # disconnected, or closed by the doorman
            pass
        return None
