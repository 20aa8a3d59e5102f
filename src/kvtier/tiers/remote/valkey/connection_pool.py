"""Pool of connections to a Valkey or Redis server."""

from __future__ import annotations

import os
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Final

from kvtier.core.errors import ConfigError
from kvtier.core.system.process import OwnerProcess
from kvtier.core.system.user_paths import user_path
from kvtier.tiers.remote.location import Location, StoreOptions
from kvtier.tiers.remote.valkey.resp import ReplyError, RespConnection, RespError

PORT: Final = 6379
PASSWORDS: Final = ("VALKEYCLI_AUTH", "REDISCLI_AUTH")
"""Environment variables that the servers' own tools read."""
CONNECT_S: Final = 1.0
OPEN_S: Final = 2.0
LONGEST_S: Final = 3600.0
DATABASE: Final = re.compile("[0-9]{0,9}")
MEANINGS: Final = {
    "READONLY": "READONLY: it is a replica, which takes no writes; name the primary",
    "OOM": "OOM: it is full and evicts nothing; see its maxmemory-policy",
}
"""Error codes that say too little by themselves."""
ERROR_CODE: Final = re.compile(r"[A-Z][A-Z0-9_]{0,31}(?![^ ])")
"""The first word of a server's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyOptions(StoreOptions):
    prefix: str = "kvtier:"
    """Prefix of all keys."""
    max_age_s: int = 0
    """Expiry of a block in seconds, whether or not room is needed; 0 for never."""
    ca_file: str = ""
    """File of certificate authorities trusted for the server, in place of the system's."""
    cert_file: str = ""
    """Client certificate file, with its key."""


class ConnectionPool:
    """Connections to one server. Thread-safe.

    Raises ``ConfigError`` for a URL without a server, and for unreadable certificates.
    """

    def __init__(self, location: Location, options: ValkeyOptions) -> None:
        if not location.host:
            raise ConfigError(f'storage: {location}: no server; write it as "valkey://host"')
        if not DATABASE.fullmatch(location.path):
            raise ConfigError(
                f"storage: {location.scheme}: what stands behind the server is the number of a "
                'database; write it as "valkey://host:port/0", and signs of a password '
                "percent-encoded"
            )
        self._location = location
        self._tls = _tls(options, location) if location.scheme == "valkeys" else None
        self._process = OwnerProcess()
        self._idle: list[RespConnection] = []
        self._lock = Lock()
        self._is_closed = False
        self.last_error = ""
        """Reason of the last failure."""

    @property
    def note(self) -> str:
        """ "with TLS", or ""."""
        return "with TLS" if self._tls else ""

    def use(self, work: Callable[[RespConnection], object], timeout_s: float) -> Exception | None:
        """Run ``work`` with exclusive use of a connection.

        Returns its error, if any; the connection is closed then.
        """
        line: RespConnection | None = None
        try:
            line = self._take(time.monotonic() + min(timeout_s, LONGEST_S))
            work(line)
        except (OSError, ReplyError) as error:
            if line is not None:
                line.close()
            self.last_error = reason_of(error)
            return error
        except BaseException:
            if line is not None:
                line.close()
            raise
        self._give_back(line)
        return None

    def _take(self, ends_at: float) -> RespConnection:
        if ends_at <= time.monotonic():
            raise RespError("it took too long")
        with self._lock:
            if self._is_closed:
                raise RespError("the tier is closed")
            if not self._process.is_here:  # the connections are the parent's
                self._process, self._idle = OwnerProcess(), []
            idle, self._idle = self._idle, []
            line = idle.pop() if idle else None
            # A server that closes connections that were idle for long has closed all of them.
            stale = [line, *idle] if line is not None and line.is_stale else []
            self._idle += idle if not stale else []
        for each in stale:
            each.close()
        if line is None or stale:
            return self._connect(ends_at)
        line.until(ends_at)
        return line

    def _give_back(self, line: RespConnection) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(line)
                return
        line.close()

    def _connect(self, ends_at: float) -> RespConnection:
        at = self._location
        line = RespConnection(
            at.host, at.port or PORT, self._tls, min(ends_at, time.monotonic() + CONNECT_S)
        )
        try:
            password = at.password or next(
                (os.environ[n] for n in PASSWORDS if n in os.environ), ""
            )
            if password:
                words = [_encoded(at.user)] if at.user else []
                line.execute(b"AUTH", *words, _encoded(password))
            if at.path:
                line.execute(b"SELECT", at.path.encode())
            line.until(ends_at)
        except BaseException:
            line.close()
            raise
        return line

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()


def _encoded(text: str) -> bytes:
    """Return the bytes of a name or a password, which need not be UTF-8."""
    return text.encode(errors="surrogateescape")


def reason_of(error: Exception) -> str:
    """Return the reason of an error in a few words.

    Of a server's error only the code is kept: the rest may repeat what was sent.
    """
    if isinstance(error, ReplyError):
        code = ERROR_CODE.match(str(error))
        return MEANINGS.get(code[0], code[0]) if code else "an error without a code"
    return (
        (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
    )


def _tls(options: ValkeyOptions, location: Location) -> ssl.SSLContext:
    try:
        made = ssl.create_default_context(
            cafile=str(user_path(options.ca_file)) if options.ca_file else None
        )
        if options.cert_file:
            made.load_cert_chain(user_path(options.cert_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"storage: {location}: ca_file, cert_file: {reason_of(error)}; name files in PEM"
        ) from None
    return made
