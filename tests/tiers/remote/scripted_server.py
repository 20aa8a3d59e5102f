"""A server that speaks RESP from a dictionary, and alters its replies for a test."""

from __future__ import annotations

import re
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

LOOPBACK = "127.0.0.1"
OK, NULL = b"+OK\r\n", b"$-1\r\n"
ERROR = re.compile(rb"-[^\r\n]*\r\n")
"""A complete error reply. A client goes on after it, so the connection stays."""

Alter = Callable[[list[bytes], bytes], bytes]
"""Returns what is sent in the place of the right reply to a command; b"" ends the connection."""


def bulk(value: bytes) -> bytes:
    """Return the reply that holds a string."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


def array(*replies: bytes) -> bytes:
    """Return the reply that holds other replies."""
    return b"*%d\r\n" % len(replies) + b"".join(replies)


class Listener(ABC):
    """Listens on loopback until it is closed, and serves each connection in a thread."""

    def __init__(self) -> None:
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]
        self._lines: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                line, _ = self._listener.accept()
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._lines.append(line)
                threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    @abstractmethod
    def _serve(self, line: socket.socket) -> None:
        """Serve one connection."""

    def close(self) -> None:
        """End all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for each in (self._listener, *self._lines):
            with suppress(OSError):
                each.close()


class ScriptedServer(Listener):
    """Speaks RESP. ``values`` is its content.

    ends: close the connection after an altered reply, so that the client does not wait for more.
    """

    def __init__(self, alter: Alter = lambda _, reply: reply, ends: bool = False) -> None:
        self._ends = ends
        self.alter = alter
        self.values: dict[bytes, bytes] = {}
        super().__init__()

    def _serve(self, line: socket.socket) -> None:
        with suppress(OSError, ValueError), line, line.makefile("rb") as sent:
            while start := sent.readline():
                words = []
                for _ in range(int(start[1:])):
                    words.append(sent.read(int(sent.readline()[1:])))
                    sent.read(2)
                right = self._reply(words)
                reply = self.alter(words, right)
                if not reply:
                    return
                line.sendall(reply)
                if self._ends and reply != right and not ERROR.fullmatch(reply):
                    return

    def _reply(self, words: list[bytes]) -> bytes:
        match words:
            case [b"SET", key, value, *_]:
                self.values[key] = value
                return OK
            case [b"GET", key]:
                return bulk(self.values[key]) if key in self.values else NULL
            case [b"GETRANGE", key, first, last]:
                return bulk(self.values.get(key, b"")[int(first) : int(last) + 1])
            case [b"STRLEN", key]:
                return b":%d\r\n" % len(self.values.get(key, b""))
            case [b"UNLINK", *keys]:
                return b":%d\r\n" % sum(self.values.pop(key, None) is not None for key in keys)
            case [b"OBJECT", *_]:
                return b":1\r\n"
            case [b"INFO", *_]:
                return bulk(b"# Cluster\r\ncluster_enabled:0\r\n")
            case [b"CONFIG", *_]:
                return array(bulk(b"maxmemory-policy"), bulk(b"allkeys-lru"))
            case [b"SCAN", *_]:
                return array(bulk(b"0"), array(*map(bulk, self.values)))
        return OK
