"""A real node in a process of its own, for tests: ``with running(socket=...) as node``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.devices import find_device
from kvtier.node.config import NodeConfig
from kvtier.node.node import CacheNode
from kvtier.node.server import NodeServer

START_S = 20.0


@dataclass(slots=True)
class RunningNode:
    """A node's process. settings: of its ``NodeConfig``, as JSON values."""

    settings: dict[str, object]
    process: subprocess.Popen[bytes]

    @property
    def socket(self) -> Path:
        """Path of its socket."""
        return Path(str(self.settings["socket"]))

    def kill(self) -> None:
        """Kill it at once, as a crash does."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop it, so that it answers nothing until ``resume``."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def start(self) -> None:
        """Start it again after it has ended, with the same settings."""
        self.process = _start(self.settings)


def _start(settings: dict[str, object]) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "tests.nodes", json.dumps(settings)]
    process = subprocess.Popen(command, cwd=root, env=environment)
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(settings["socket"]))
            except OSError:
                time.sleep(0.02)
            else:
                return process
    process.kill()
    raise RuntimeError(f"the node did not start: {settings}")


@contextmanager
def running(folder: Path, **settings: object) -> Iterator[RunningNode]:
    """Run a node with its socket in ``folder``. settings: see ``NodeConfig``."""
    defaults: dict[str, object] = {
        "socket": str(folder / "node.sock"),
        "memory_path": f"/dev/shm/kvtier-test-{os.getpid()}-{folder.name}",
        "host_capacity": "64MiB",
        "segment_capacity": "4MiB",
    }
    given = defaults | settings
    node = RunningNode(given, _start(given))
    try:
        yield node
    finally:
        node.resume()
        node.kill()
        directory = Path(str(given["memory_path"]))
        for each in directory.iterdir() if directory.exists() else ():
            each.unlink()
        if directory.exists():
            directory.rmdir()


def main() -> None:
    """Serve until the process ends."""
    settings = json.loads(sys.argv[1])
    settings["socket"] = Path(settings["socket"])
    settings["memory_path"] = Path(settings["memory_path"])
    config = NodeConfig(**settings)

    async def serve() -> None:
        await NodeServer(CacheNode(config, find_device("cpu")), config.socket).serve()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
