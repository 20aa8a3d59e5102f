"""A network that is slow, or breaks: a proxy between a client and a real server on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from queue import SimpleQueue


class Proxy:
    """Passes on what comes, ``delay_s`` later each way. Close it.

    hold: nothing is passed on any more, and nobody is told (a black hole), until ``let_go``. cut:
    all connections end now, by a reset. passes: bytes, either way, after which it holds; None for
    all.
    """

    def __init__(self, port: int, delay_s: float = 0.0) -> None:
        self._to = ("127.0.0.1", port)
        self.delay_s = delay_s
        self.passes: int | None = None
        self.num_connections = 0
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, passes: int = 0) -> None:
        self.passes = passes
        if not passes:
            self._open.clear()

    def let_go(self) -> None:
        self.passes = None
        self._open.set()

    def cut(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self._is_closed = True
        self.let_go()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._to)
            except OSError:
                continue
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets += [client, server]
                self.num_connections += 1
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, src: socket.socket, dst: socket.socket) -> None:
        line: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        threading.Thread(target=self._deliver, args=(line, src, dst), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := src.recv(1 << 16):
                line.put((time.monotonic() + self.delay_s, data))
        line.put((0.0, b""))

    def _deliver(
        self, line: SimpleQueue[tuple[float, bytes]], src: socket.socket, dst: socket.socket
    ) -> None:
        """Each part when its time has come: many may be under way."""
        with contextlib.suppress(OSError):
            while (part := line.get())[1]:
                due_s, data = part
                time.sleep(max(0.0, due_s - time.monotonic()))
                if self.passes is not None:
                    now, data = data[: self.passes], data[self.passes :]
                    self.passes -= len(now)
                    dst.sendall(now)
                    if not data:
                        continue
                    self._open.clear()
                self._open.wait()
                dst.sendall(data)
        for each in (src, dst):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
