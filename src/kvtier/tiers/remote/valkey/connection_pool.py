"""Pool of connections to a Valkey or Redis server, and a test of the server."""

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
from kvtier.tiers.remote.valkey.resp import ReplyError, RespConnection, RespError, command

PORT: Final = 6379
PASSWORDS: Final = ("VALKEYCLI_AUTH", "REDISCLI_AUTH")
"""Environment variables that the servers' own tools read."""
CONNECT_S: Final = 1.0
OPEN_S: Final = 2.0
LONGEST_S: Final = 3600.0
PROBE_BYTES: Final = 96
DATABASE: Final = re.compile("[0-9]{0,9}")
REFUSALS: Final = ("NOAUTH", "WRONGPASS", "NOPERM", "ERR AUTH", "ERR DB index", "ERR invalid DB")
"""Errors that retries cannot fix."""
ANSWERS: Final = "answers"
"""State of a usable server."""
MEANINGS: Final = {
    "READONLY": "READONLY: it is a replica, which takes no writes; name the primary",
    "OOM": "OOM: it is full and evicts nothing; see its maxmemory-policy",
}
"""Error codes that say too little by themselves."""
REDIRECTS: Final = ("MOVED", "ASK", "CLUSTERDOWN")
"""Errors of a server that holds only a part of the keys."""
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
            line = self._idle.pop() if self._idle else None
        if line is None:
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

    def test(self, prefix: bytes) -> str:
        """Test the server. Return its state in words.

        Raises ``ConfigError`` for a server that refuses the credentials, does not return what it
        was given, or belongs to a cluster.
        """
        key, value = prefix + b"self-test:" + os.urandom(16), os.urandom(PROBE_BYTES)
        answers: list[object] = []
        remark = ""

        def ask(line: RespConnection) -> None:
            nonlocal remark
            found = _execute_if_allowed(line, b"INFO", b"cluster")
            if isinstance(found, bytes) and b"cluster_enabled:1" in found:
                raise ReplyError(REDIRECTS[0])
            line.execute(b"SET", key, value, b"PX", b"60000")
            line.send([command(b"GETRANGE", key, b"1", b"4"), command(b"GET", key)])
            answers.extend((line.reply(), line.reply()))
            answers.append(line.execute(b"UNLINK", key))
            policy = _execute_if_allowed(line, b"CONFIG", b"GET", b"maxmemory-policy")
            if isinstance(policy, list) and policy[1:] == [b"noeviction"]:
                remark = (
                    "; it keeps what it has when it is full: set its maxmemory-policy to "
                    "allkeys-lru"
                )

        error = self.use(ask, OPEN_S)
        if isinstance(error, ReplyError):
            return self._refused(error)
        if error is not None:
            return f"not reached: {reason_of(error)}"
        if answers != [value[1:5], value, 1]:
            raise ConfigError(
                f"storage: {self._location} does not give back what it was given; use a Valkey or "
                "Redis server"
            )
        return f"{ANSWERS}{remark}"

    def _refused(self, error: ReplyError) -> str:
        if str(error).startswith(REDIRECTS):
            raise ConfigError(
                f"storage: {self._location} is a node of a cluster, whose redirects are not "
                "followed; name a server that stands alone, or a proxy before the cluster"
            )
        if str(error).startswith(REFUSALS):
            raise ConfigError(f"storage: {self._location} refuses: {reason_of(error)}")
        return f"can't be written: {reason_of(error)}"

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()


def _execute_if_allowed(line: RespConnection, *words: bytes) -> object:
    """Return a reply; None if this user may not run the command."""
    try:
        return line.execute(*words)
    except ReplyError:
        return None


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
