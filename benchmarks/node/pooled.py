"""Nodes of three machines over one Mooncake Store, to which each machine lends memory.

    make peers-stores
    .peers/stores/bin/python -m benchmarks.node.pooled       # as root: it makes network namespaces

The machines are network namespaces with 10 Gbit/s between them. Blocks that one node has stored are
loaded through the nodes of the others, and compared; then the first machine dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from benchmarks.node.processes import PATIENCE_S, Bytes, until
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from kvtier.core.types import BlockKey, BlockName
from kvtier.layout import opaque
from kvtier.node.client.channel import NodeClient
from kvtier.node.client.tier import NodeTier
from kvtier.tiers import Outcome, Pieces, StorageSite
from tests.kit.nodes import NodeProcess
from tests.kit.servers import has_mooncake, wait_for

NUM_MACHINES: Final = 3
BRIDGE, NAME, RATE = "kvtier", "kvtier{}", "10gbit"
NETWORK, MASTER = "10.77.0", "10.77.0.254"
MASTER_PORT, LINE_PORT = 50051, 50060
LINE_BYTES = 512 << 20
BLOCK_BYTES, NUM_BLOCKS = 1 << 20, 96
WRITTEN_S = 15.0
"""Seconds for writes while the store still places blocks on the machine that died."""
HOST_BYTES, LENT_BYTES = 256 << 20, 512 << 20
LINE, POOL, MEMORY = "one TCP connection", "load from the pool", "load from the node's memory"
NAMESPACE = b"n" * 32

SEND: Final = """
import socket, sys
line = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
line.accept()[0].sendall(bytes(int(sys.argv[3])))
"""
RECEIVE: Final = """
import socket, sys, time
left, part = int(sys.argv[3]), bytearray(1 << 20)
line = socket.create_connection((sys.argv[1], int(sys.argv[2])))
began_s = time.perf_counter()
while left:
    left -= line.recv_into(part)
print(int(sys.argv[3]) / 1e9 / (time.perf_counter() - began_s), flush=True)
"""


@dataclass(frozen=True)
class Row:
    """A measure and its value."""

    what: str
    unit: str
    value: float


class Machine:
    """A network namespace with an address, memory lent to the store, and a node."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name, self.address = NAME.format(number), f"{NETWORK}.{number + 1}"
        self._folder = folder / self.name
        self._folder.mkdir()
        outer, inner = f"{self.name}-out", f"{self.name}-in"
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        _ip("link", "set", inner, "netns", self.name)
        _ip("link", "set", outer, "master", BRIDGE, "up")
        for change in (
            ("addr", "add", f"{self.address}/24", "dev", inner),
            ("link", "set", inner, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", self.name, *change)
        limit = ("root", "tbf", "rate", RATE, "burst", "1mb", "latency", "50ms")
        for where in (["-n", self.name], inner), ([], outer):
            _run("tc", *where[0], "qdisc", "add", "dev", where[1], *limit)
        self._processes: list[subprocess.Popen[str]] = []
        self.node: NodeProcess | None = None

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a process in the namespace."""
        with (self._folder / "log").open("ab") as log:
            made = subprocess.Popen(
                ("ip", "netns", "exec", self.name, *command),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._processes.append(made)
        return made

    def lend(self, program: Path) -> None:
        """Lend memory to the store, and start a node over it."""
        master = f"{MASTER}:{MASTER_PORT}"
        self.start(
            str(program),
            f"--host={self.address}",
            f"--global_segment_size={LENT_BYTES}",
            f"--master_server_address={master}",
            "--metadata_server=P2PHANDSHAKE",
        )
        self.node = NodeProcess(
            self._folder,
            f"--host-capacity={HOST_BYTES}",
            f"--storage=mooncake://{master}",
            before=("ip", "netns", "exec", self.name),
        )

    def kill(self) -> None:
        """End everything that runs here, as a machine that dies does."""
        for pid in _run("ip", "netns", "pids", self.name).split():
            os.kill(int(pid), signal.SIGKILL)
        for process in self._processes:
            process.wait()
        if self.node is not None:
            self.node.kill()
            self.node = None
        self._processes.clear()


class Engine:
    """An engine's view of its machine's node: it stores and loads blocks, and compares them."""

    def __init__(self, machine: Machine) -> None:
        assert machine.node is not None, "its node runs"
        site = StorageSite("node", "node", opaque(BLOCK_BYTES), HOST_BYTES)
        self.tier = NodeTier(site, NodeClient(machine.node.socket))
        self._bytes = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        begins = self._bytes.ctypes.data + BLOCK_BYTES * np.arange(NUM_BLOCKS, dtype=np.uint64)
        self._pieces = Pieces.whole(begins, BLOCK_BYTES)

    def store(self, keys: Sequence[BlockKey]) -> None:
        self._bytes[:] = [_content(key) for key in keys]
        names = [BlockName(NAMESPACE, at, key) for at, key in enumerate(keys)]
        until(lambda: set(self.tier.put(names, self._pieces, 5.0)) == {Outcome.THERE})

    def wait_for(self, keys: Sequence[BlockKey]) -> None:
        """Wait until the node finds all blocks, in its memory or in the store."""
        until(lambda: set(self.tier.find(keys, 1.0)) == {Outcome.THERE})

    def load_all(self, keys: Sequence[BlockKey]) -> float:
        """Load blocks, and return the GB/s. Raises RuntimeError unless all of them are right."""
        found, rate = self.load(keys)
        if found[Outcome.THERE] < len(keys):
            raise RuntimeError(f"not all blocks were loaded: {found}")
        return rate

    def load(self, keys: Sequence[BlockKey]) -> tuple[Counter[Outcome], float]:
        """Return the outcomes, and the GB/s of the blocks that were there.

        Raises RuntimeError if the bytes of a block are wrong.
        """
        self._bytes[:] = 0
        began_s = time.perf_counter()
        outcomes = self.tier.get(keys, self._pieces, PATIENCE_S)
        took_s = time.perf_counter() - began_s
        for key, content, outcome in zip(keys, self._bytes, outcomes, strict=True):
            if outcome is Outcome.THERE and not np.array_equal(content, _content(key)):
                raise RuntimeError("other bytes came back than were stored")
        found = Counter(outcomes)
        return found, found[Outcome.THERE] * BLOCK_BYTES / 1e9 / took_s


def _content(key: BlockKey) -> Bytes:
    rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
    return np.frombuffer(rng.bytes(BLOCK_BYTES), np.uint8)


def _keys(seed: int) -> list[BlockKey]:
    rng = np.random.default_rng(seed)
    return [BlockKey(rng.bytes(32)) for _ in range(NUM_BLOCKS)]


@contextmanager
def _machines(folder: Path) -> Iterator[list[Machine]]:
    """Yield machines on one network, whose bridge has the address of the store's master."""
    with ExitStack() as undo:
        _ip("link", "add", BRIDGE, "type", "bridge")
        undo.callback(_ip, "link", "del", BRIDGE)
        _ip("addr", "add", f"{MASTER}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        made = []
        for number in range(NUM_MACHINES):
            name = NAME.format(number)
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
            made.append(Machine(number, folder))
            undo.callback(_ip, "link", "del", f"{name}-out")
            undo.callback(made[-1].kill)
        yield made


@contextmanager
def _master(program: Path, log: Path) -> Iterator[None]:
    command = (str(program), f"--rpc_address={MASTER}", f"--rpc_port={MASTER_PORT}")
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        wait_for(MASTER_PORT, process, MASTER)
        yield
    finally:
        process.kill()
        process.wait()


def _line_gb_per_s(sender: Machine, receiver: Machine) -> float:
    """Return the rate of one TCP connection."""
    where = (sender.address, str(LINE_PORT), str(LINE_BYTES))
    sent = sender.start(sys.executable, "-c", SEND, *where)
    assert sent.stdout is not None, "it was asked for"
    sent.stdout.readline()  # it listens now
    received = receiver.start(sys.executable, "-c", RECEIVE, *where)
    rate = float(received.communicate()[0])
    sent.wait()
    return rate


def measure(num_rounds: int) -> list[Row]:
    program = has_mooncake()
    if program is None or os.geteuid():
        sys.exit("wanted: Mooncake (make peers-stores), and root, for network namespaces")
    client = program.with_name("mooncake_client")
    for each in program, client:  # the wheel loses the executable bit
        each.chmod(0o755)
    rates: dict[str, list[float]] = {name: [] for name in (LINE, POOL, MEMORY)}
    with (
        TemporaryDirectory(prefix="kvtier-pooled-") as folder,
        _machines(Path(folder)) as machines,
        _master(program, Path(folder) / "master.log"),
    ):
        for machine in machines:
            machine.lend(client)
        first, second, third = map(Engine, machines)
        for number in range(num_rounds):
            keys = _keys(number)
            rates[LINE].append(_line_gb_per_s(*machines[:2]))
            first.store(keys)
            second.wait_for(keys)
            for name in POOL, MEMORY:
                rates[name].append(second.load_all(keys))
        third.load_all(keys)
        rows = [Row(name, "GB/s", float(np.median(rate))) for name, rate in rates.items()]
        lost = _keys(num_rounds)
        first.store(lost)
        second.wait_for(lost)
        machines[0].kill()
        began_s = time.perf_counter()
        found, _ = second.load(lost)
        rows.append(Row("first load after a machine died", "s", time.perf_counter() - began_s))
        rows += [
            Row(f"its blocks: {each.name.lower()}", f"of {NUM_BLOCKS}", found[each])
            for each in Outcome
        ]
        began_s = time.perf_counter()
        found, _ = third.load(lost)
        rows.append(Row("next load, elsewhere", "s", time.perf_counter() - began_s))
        keys = _keys(num_rounds + 1)
        second.store(keys)
        time.sleep(WRITTEN_S)
        found, _ = third.load(keys)
        rows.append(Row("stored then, found elsewhere", f"of {NUM_BLOCKS}", found[Outcome.THERE]))
    return rows


def _ip(*change: str) -> None:
    _run("ip", *change)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = parser_of("node.pooled", __doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rows = measure(options.rounds)
    cells = ((row.what, row.unit, f"{row.value:.4g}") for row in rows)
    table = table_of("A pool of three machines", ("what", "unit"), ("value",), cells)
    report(options.json, "node.pooled", machine_facts(), rows, [], table)


if __name__ == "__main__":
    main()
