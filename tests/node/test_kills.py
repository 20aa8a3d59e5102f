"""Engines and the node are killed and stopped at any moment: no wrong bytes, and no lost slot."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvtier.node.client.tier import KEY_BYTES, SCOPE
from kvtier.node.wire import protocol
from tests.kit.waiting import wait_until
from tests.node.forking import BLOCK, NUM_SLOTS
from tests.node.harness import Bare, bare

NUM_KILLS = int(os.environ.get("KVTIER_NUM_KILLS", "60"))
NUM_ENGINES = 3


class Forker:
    """Starts nodes and engines in a folder, and kills them.

    processes: ids of the running processes that it has started.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: set[int] = set()
        self._num_engines = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.node.forking", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._hear()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _fork(self, line: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        process = int(self._hear())
        self.processes.add(process)
        return process

    def node(self) -> int:
        process = self._fork("node")
        wait_until(lambda: _attaches(self.folder / "node.sock"))
        return process

    def engine(self) -> int:
        self._num_engines += 1
        return self._fork(f"engine {self._num_engines}")

    def kill(self, process: int) -> None:
        os.kill(process, signal.SIGKILL)
        self.processes.remove(process)
        wait_until(lambda: not Path(f"/proc/{process}").exists())

    def close(self) -> None:
        for process in list(self.processes):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _attaches(path: Path) -> bool:
    with suppress(OSError), bare(path) as engine:
        return isinstance(engine.attach("first"), protocol.AttachAnswer)
    return False


@contextmanager
def forker(folder: Path) -> Iterator[Forker]:
    made = Forker(folder)
    try:
        yield made
    finally:
        made.close()


def num_free(folder: Path) -> int:
    """Return the number of free slots of the partition: reserve and release them."""
    with bare(folder / "node.sock") as engine:
        engine.attach("last", client=str(time.monotonic()))
        partition = engine.open(BLOCK, KEY_BYTES, SCOPE).partition
        num = len(protocol.unpack(_reserved(engine, partition)))
        engine.send(protocol.DetachNotice())
        assert engine.is_closed()
        return num


def _reserved(engine: Bare, partition: int) -> bytes:
    names = b"".join(b"last".ljust(KEY_BYTES - 1) + bytes([at]) for at in range(NUM_SLOTS))
    told = engine.ask(protocol.ReserveRequest(3, partition, names))
    return bytes(told.slots)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_and_stops_leave_no_wrong_bytes_and_lose_no_slot(tmp_path: Path) -> None:
    rng = random.Random(1)
    done: Counter[str] = Counter()
    with forker(tmp_path) as forks:
        node = forks.node()
        engines = [forks.engine() for _ in range(NUM_ENGINES)]
        stopped: set[int] = set()
        while sum(done.values()) < NUM_KILLS:
            time.sleep(rng.choice([0.02, 0.1, 0.5]))
            if stopped and rng.random() < 0.5:
                resumed = rng.choice(sorted(stopped))
                os.kill(resumed, signal.SIGCONT)
                stopped.remove(resumed)
                continue
            victim = rng.choice([node, *engines])
            kind = "node" if victim == node else "engine"
            if victim not in stopped and rng.random() < 0.5:
                os.kill(victim, signal.SIGSTOP)
                stopped.add(victim)
                done[f"{kind} stopped"] += 1
            else:
                stopped.discard(victim)
                forks.kill(victim)
                done[f"{kind} killed"] += 1
                if victim == node:
                    node = forks.node()
                else:
                    engines[engines.index(victim)] = forks.engine()
        for process in stopped:
            os.kill(process, signal.SIGCONT)
        time.sleep(2.0)
        assert all(Path(f"/proc/{process}").exists() for process in (node, *engines))
        for engine in engines:
            forks.kill(engine)
        wait_until(lambda: num_free(tmp_path) == NUM_SLOTS)
    found = _read_logs(tmp_path)
    print(f"\n{dict(done)}, {dict(found)}")
    assert not list(tmp_path.glob("broken-*")), "a process failed"
    assert not found["wrong"], "wrong bytes"
    assert not found["late"], "a call waited past its deadline"
    assert min(found["get there"], found["put there"]) > NUM_KILLS, "little happened between them"


def _read_logs(folder: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for log in folder.glob("engine-*.log"):
        for line in log.read_text().splitlines():
            name, _, num = line.partition(": ")
            found[name.split()[0] if not num else name] += int(num or 1)
    return found
