"""A network that is slow, or breaks: a proxy between a client and a real server on loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

LOOPBACK = "127.0.0.1"
RESET = b"\1\0\0\0\0\0\0\0"
"""SO_LINGER: a close sends a reset to the other side."""

Line = SimpleQueue[tuple[float, bytes]]


class Proxy:
    """Forwards bytes between clients and a server, ``delay_s`` later each way. Close it.

    to_port: the server's port. port: its own port; 0 for any.

    hold: forward so many more bytes, either way, then none until ``release``, with connections left
    open (a black hole). cut: end all connections now.
    """

    def __init__(self, to_port: int, delay_s: float = 0.0, port: int = 0) -> None:
        self._to = (LOOPBACK, to_port)
        self.delay_s = delay_s
        self._left: int | None = None
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server((LOOPBACK, port))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        """URL for HTTP clients."""
        return f"http://{LOOPBACK}:{self.port}"

    def hold(self, passes: int = 0) -> None:
        with self._lock:
            self._left = passes
            if not passes:
                self._open.clear()

    def release(self) -> None:
        with self._lock:
            self._left = None
        self._open.set()

    @contextmanager
    def stalled(self, passes: int = 0) -> Iterator[None]:
        """Call ``hold``, and ``release`` at the end."""
        self.hold(passes)
        try:
            yield
        finally:
            self.release()

    def cut(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self.release()
        with suppress(OSError):  # a thread in accept() is not woken by a close alone
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(10)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._to)
            except OSError:
                client.close()
                continue
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets += [client, server]
            for src, dst in ((client, server), (server, client)):
                line: Line = SimpleQueue()
                self._start(self._read, src, line)
                self._start(self._write, line, src, dst)

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _read(self, src: socket.socket, line: Line) -> None:
        with suppress(OSError):
            while data := src.recv(1 << 16):
                line.put((time.monotonic() + self.delay_s, data))
        line.put((0.0, b""))

    def _write(self, line: Line, src: socket.socket, dst: socket.socket) -> None:
        """Write each part at its time; many may be in flight."""
        with suppress(OSError):
            while (part := line.get())[1]:
                due_s, data = part
                time.sleep(max(0.0, due_s - time.monotonic()))
                while data:
                    now = self._passed(data)
                    dst.sendall(data[:now])
                    data = data[now:]
                    self._open.wait()
        for each in (src, dst):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _passed(self, data: bytes) -> int:
        """Return how many bytes of ``data`` may pass."""
        self._open.wait()
        with self._lock:
            if self._left is None:
                return len(data)
            now = min(len(data), self._left)
            self._left -= now
            if not self._left:
                self._open.clear()
            return now
