"""Servers that tests start, and a proxy between them and a tier."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

START_S = 60.0
BUCKET = "kvtier"


def find_binary(name: str) -> str | None:
    """Beside the interpreter, or on the PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def free_ports(num: int) -> list[int]:
    """Of the loopback address. SeaweedFS takes each port's gRPC twin 10000 above, too."""
    taken: list[socket.socket] = []
    ports: list[int] = []
    try:
        while len(ports) < num:
            one = socket.socket()
            taken.append(one)
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            twin = socket.socket()
            taken.append(twin)
            with suppress(OSError, OverflowError):
                twin.bind(("127.0.0.1", port - 10000))
                ports.append(port - 10000)
        return ports
    finally:
        for one in taken:
            one.close()


class Server:
    """A process that is started, killed and started again. url: where it answers."""

    def __init__(self, command: list[str], url: str, log: Path) -> None:
        self.url = url
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers, whatever it says."""
        # SeaweedFS takes credentials that it finds there for those of its users.
        env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=env)
        end_s = time.monotonic() + START_S
        while not self._answers():
            if time.monotonic() > end_s or self._process.poll() is not None:
                self.kill()
                raise RuntimeError(f"no server: {self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url, timeout=2):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def seaweed(binary: str, folder: Path) -> Server:
    """A server of S3; the bucket is to be made."""
    master, volume, filer, s3 = free_ports(4)
    (folder / "data").mkdir(parents=True)
    command = [binary, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-master.port={master}", f"-volume.port={volume}", "-filer"]
    command += [f"-filer.port={filer}", "-s3", f"-s3.port={s3}"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # at fixed ports else
    command += ["-master.volumeSizeLimitMB=64", "-volume.max=16", "-master.telemetry=false"]
    return Server(command, f"http://127.0.0.1:{s3}", folder / "log")


def rclone(binary: str, folder: Path, user: str) -> Server:
    """A server that is called S3, and writes over what was only to be created.

    user: "key,secret", the only one that it lets in.
    """
    (port,) = free_ports(1)
    (folder / "data" / BUCKET).mkdir(parents=True)
    command = [binary, "serve", "s3", str(folder / "data"), "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", user]
    return Server(command, f"http://127.0.0.1:{port}", folder / "log")


def make_bucket(url: str) -> None:
    """Ask for it until it is there, and has taken an object: the first one takes seconds."""
    end_s = time.monotonic() + START_S
    for path in (BUCKET, f"{BUCKET}/first"):
        while not _is_put(f"{url}/{path}"):
            if time.monotonic() > end_s:
                raise RuntimeError(f"{url}: no {path} could be made")
            time.sleep(0.1)


def _is_put(url: str) -> bool:
    request = urllib.request.Request(url, method="PUT", data=b"1" if url.endswith("first") else b"")
    try:
        with urllib.request.urlopen(request, timeout=3):
            return True
    except OSError:
        return False


class Proxy:
    """Passes bytes on to a server; stops doing so for a while, or ends all connections.

    stall(num_bytes): after so many bytes more from the tier to the server, or back, nothing moves.
    """

    def __init__(self, to_url: str, port: int = 0) -> None:
        host, _, to_port = to_url.removeprefix("http://").partition(":")
        self._to = (host, int(to_port))
        self._listener = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = threading.Event()
        self._open.set()
        self._left: int | None = None
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            try:
                other = socket.create_connection(self._to)
            except OSError:
                one.close()
                continue
            with self._lock:
                self._sockets += [one, other]
            for pair in ((one, other), (other, one)):
                thread = threading.Thread(target=self._pass_on, args=pair, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, src: socket.socket, dst: socket.socket) -> None:
        with suppress(OSError):
            while data := src.recv(1 << 14):
                self._wait(len(data))
                dst.sendall(data)
        for each in (src, dst):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _wait(self, num_bytes: int) -> None:
        with self._lock:
            if self._left is not None:
                self._left -= num_bytes
                if self._left < 0:
                    self._open.clear()
        self._open.wait()

    @contextmanager
    def stalled(self, after_bytes: int = 0) -> Iterator[None]:
        with self._lock:
            self._left = after_bytes
        try:
            yield
        finally:
            with self._lock:
                self._left = None
            self._open.set()

    def cut(self) -> None:
        """End all connections."""
        with self._lock:
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._open.set()
        # A thread in accept() is not woken by a close alone.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(10)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)
        for each in self._sockets:
            each.close()
