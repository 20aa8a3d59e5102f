"""A network link of limited bandwidth, between a client and a real server on loopback."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from typing import Final

LOOPBACK: Final = "127.0.0.1"
PIPE_BYTES: Final = 1 << 20
SET_PIPE_SIZE: Final = 1031
"""F_SETPIPE_SZ of fcntl(2)."""
STEP_BYTES: Final = 256 << 10
BURST_S: Final = 0.002
"""Time by which the link may be ahead, because sleeps are not exact."""


class Link:
    """Forwards bytes at ``bits_per_s`` each way, over all connections. Close it.

    splice(2) moves the bytes, so that a link of 10 Gb/s costs little processor time.
    """

    def __init__(self, to_port: int, bits_per_s: float) -> None:
        self._to_port = to_port
        self._bytes_per_s = bits_per_s / 8
        self._free_at = [0.0, 0.0]
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection((LOOPBACK, self._to_port))
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [client, server]
            for way, (src, dst) in enumerate(((client, server), (server, client))):
                threading.Thread(target=self._pass, args=(src, dst, way), daemon=True).start()

    def _pass(self, src: socket.socket, dst: socket.socket, way: int) -> None:
        import fcntl

        out_of, into = os.pipe()
        with suppress(OSError):
            fcntl.fcntl(into, SET_PIPE_SIZE, PIPE_BYTES)
            while num := os.splice(src.fileno(), into, STEP_BYTES):
                self._wait(num, way)
                while num:
                    num -= os.splice(out_of, dst.fileno(), num)
        for end in (out_of, into):
            os.close(end)
        for each in (src, dst):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _wait(self, num_bytes: int, way: int) -> None:
        """Wait until the link has forwarded so many bytes more."""
        with self._lock:
            now = time.monotonic()
            self._free_at[way] = max(self._free_at[way], now - BURST_S)
            self._free_at[way] += num_bytes / self._bytes_per_s
            due = self._free_at[way]
        time.sleep(max(0.0, due - now))

    def close(self) -> None:
        """Close all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
