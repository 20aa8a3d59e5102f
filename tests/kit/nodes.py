"""A real node in a process of its own, for tests: ``with running(tmp_path) as node``."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any

from kvtier.node.client.control import ControlClient

SEGMENT_BYTES = 1 << 20


class NodeProcess:
    """``kvtier node run`` in ``folder``. Its disk and its socket stay the same over restarts.

    options: options of the command; they replace the defaults here. before: a command that runs it.
    """

    def __init__(
        self, folder: Path, *options: str, segments: int = 8, before: Sequence[str] = ()
    ) -> None:
        self.socket = folder / "node.sock"
        self.control = ControlClient(self.socket, 60.0)
        self._command = [
            *before,
            *(sys.executable, "-m", "kvtier.tools.cli", "node", "run"),
            f"--socket={self.socket}",
            f"--host-capacity={segments * SEGMENT_BYTES}",
            f"--segment-capacity={SEGMENT_BYTES}",
            f"--memory-path={folder / 'memory'}",
            *options,
        ]
        self._log = folder / "log"
        self._memory = folder / "memory"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline()
        assert self.said, self._log.read_text()

    def pause(self) -> None:
        """Stop it with SIGSTOP: it answers nothing until ``resume``."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it at once, as a crash does."""
        self._process.kill()
        self._process.communicate()

    def lose(self) -> None:
        """Kill it, and lose its memory, as a crash of the machine does."""
        self.kill()
        rmtree(self._memory)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        """URL of the TCP port for reading."""
        return "http://" + self.said.split("http://")[1].split("/metrics")[0]

    @property
    def log(self) -> str:
        return self._log.read_text()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Return the exit status after a signal."""
        self._process.send_signal(number)
        self._process.communicate(timeout=30)
        return self._process.returncode

    def close(self) -> None:
        if self._process.poll() is None:
            self.resume()
            assert self.stop() == 0, self._log.read_text()

    def room(self, tenant: str = "default") -> Any:
        """Return the state of a tenant's only partition."""
        rooms = self.control.get("/status")["rooms"]
        (found,) = (room for room in rooms if room["tenant"] == tenant)
        return found


@contextmanager
def running(folder: Path, *options: str, segments: int = 8) -> Iterator[NodeProcess]:
    node = NodeProcess(folder, *options, segments=segments)
    try:
        yield node
    finally:
        node.close()
