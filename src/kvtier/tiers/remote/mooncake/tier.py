"""``storage="mooncake://host:port"``: blocks as objects in a Mooncake Store.

host:port is the address of its master. Objects are immutable, and the store evicts by itself. It
has no access control, so only the secret of ``StoreOptions`` tells our blocks from others'.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock, Semaphore
from typing import Any, Final

import numpy as np

from kvtier.core.errors import ConfigError, install_command
from kvtier.core.system.child_process import Overdue, run_module
from kvtier.core.system.process import give_way, num_cores
from kvtier.core.types import BlockKey
from kvtier.tiers.remote.bounce_workers import (
    Addresses,
    Arrived,
    BounceClient,
    BounceRows,
    IsWanted,
)
from kvtier.tiers.remote.bounced_tier import BouncedTier
from kvtier.tiers.remote.errors import Unreachable, Unsound
from kvtier.tiers.remote.location import Location, StoreOptions, StorePlugin
from kvtier.tiers.storage import Outcome, StorageSite, StorageTier

PORT: Final = 50051
PROTOCOLS: Final = ("tcp", "rdma")
NO_ROOM, NOT_FOUND, NOT_READY, IS_THERE, REPLICA_GONE = -200, -704, -703, -705, -712
NO_ANSWER = -900
"""Codes of the store. A call to a master that is gone takes seconds to return ``NO_ANSWER``."""
GONE: Final = frozenset({NOT_FOUND, NOT_READY, REPLICA_GONE})
LEAST_BYTES: Final = 16 << 20
"""Least size of a contributed memory segment."""
MAX_CALLED: Final = 256
"""Blocks per call. Each call and each change of turn has a fixed cost: with half as many, gets of
64 KiB are a tenth slower and take a tenth more CPU time (measured by hand)."""
MAX_TURNS: Final = 4
"""Concurrent calls that move blocks: 1,024 blocks. Mooncake 0.3.13 refused some calls at 2,048."""
GIVES_WAY: Final = 5
"""nice(1) value: a third of a core if another thread needs the core."""
TURN_S: Final = 1.0
"""Longest wait of a transfer for its turn, so that a hanging one does not block the others."""
KNOCK: Final = "kvtier.tiers.remote.mooncake.probe"
KNOCK_S: Final = 10.0
"""Time for the probe process to start and for a master to answer it."""

THERE, ABSENT, DAMAGED, FAILED = Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeOptions(StoreOptions):
    """Options behind the ``?``."""

    prefix: str = "kvtier:"
    """Prefix of all keys."""
    protocol: str = "tcp"
    """Transport: ``tcp`` or ``rdma``."""
    device: str = ""
    """Network devices for rdma, like "mlx5_0,mlx5_1". Default: Mooncake chooses."""
    address: str = ""
    """Address under which other processes reach this one. Default: the one used to reach the
    master."""
    segment_bytes: int = 0
    """Host memory that this process contributes to the store, in addition to its host tier. Like
    "16GiB"."""
    local_buffer_bytes: int = 16 << 20
    """Buffer size of the store's client."""


def _check(location: Location, options: MooncakeOptions) -> None:
    if not location.host:
        raise ConfigError(f'storage: {location}: no master; write it as "mooncake://host:port"')
    if location.user is not None or location.password is not None:
        raise ConfigError(
            f"storage: {location}: Mooncake knows no users; leave the name and the password out, "
            "and set a secret that tags blocks"
        )
    if options.protocol not in PROTOCOLS:
        raise ConfigError(
            f"storage: {location}: protocol={options.protocol!r}; write {' or '.join(PROTOCOLS)}"
        )
    if 0 < options.segment_bytes < LEAST_BYTES:
        raise ConfigError(f"storage: {location}: segment_bytes is 0, or 16MiB at least")


def _make(site: StorageSite, location: Location, options: MooncakeOptions) -> StorageTier:
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "storage: mooncake: needs the package mooncake-transfer-engine-non-cuda, or another of "
            f"Mooncake's; install it: {install_command('mooncake')} ({error})"
        ) from error
    process = StoreProcess(location, options)
    return BouncedTier(site, location, options, process.client, MAX_CALLED)


make_mooncake = StorePlugin("mooncake", MooncakeOptions, _make, _check)
"""Makes the tier of a ``mooncake://`` URL."""


class StoreProcess:
    """This process as a member of the store, shared by all bounce workers.

    Mooncake's client waits by polling, which takes a core per call, and moves all bytes in one
    thread, which needs a core too. Therefore at most half the cores' number of calls, and at most
    four, move blocks at a time, and threads that make calls run at a lower priority.
    """

    def __init__(self, location: Location, options: MooncakeOptions) -> None:
        self._location = location
        self._options = options
        self._lock = Lock()
        self._store: Any = None
        self._num_users = 0
        self._turns = Semaphore(min(MAX_TURNS, max(1, num_cores() // 2)))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Limit the concurrent calls that move blocks. Waits for a turn for at most ``TURN_S``."""
        has_turn = self._turns.acquire(timeout=TURN_S)
        try:
            yield
        finally:
            if has_turn:
                self._turns.release()

    def client(self, rows: BounceRows) -> BounceClient:
        """Return a client for ``rows``. Raises ``Unreachable``."""
        with self._lock:
            if self._store is None:
                self._store = self._set_up()
            self._num_users += 1
        give_way(GIVES_WAY)  # after the set-up: the client's threads inherit the priority
        return MooncakeClient(self, self._store, self._options.prefix, rows)

    def _set_up(self) -> Any:
        """Set up the store's client, after a probe process has reached the master.

        If the master does not answer, the set-up blocks all Python threads of its process for
        minutes.
        """
        from mooncake.store import MooncakeDistributedStore

        store, options = MooncakeDistributedStore(), self._options
        host, port = self._location.host, self._location.port or PORT
        try:
            address = options.address or _address_towards(host, port)
        except OSError as error:
            raise Unreachable(error.strerror or str(error)) from error
        _knock(address, f"{host}:{port}")
        code = store.setup(
            address,
            "P2PHANDSHAKE",
            options.segment_bytes,
            options.local_buffer_bytes,
            options.protocol,
            options.device,
            f"{host}:{port}",
        )
        if code:
            store.close()
            raise Unreachable(f"Mooncake's client says {code}; see what it has logged")
        return store

    def leave(self) -> None:
        """Deregister one user. The last one closes the client, which withdraws its memory."""
        with self._lock:
            self._num_users -= 1
            store = None if self._num_users else self._store
            if store is not None:
                self._store = None
        if store is not None:
            store.close()


class MooncakeClient(BounceClient):
    """Client of the store for one bounce worker, whose rows are registered with it."""

    def __init__(self, process: StoreProcess, store: Any, prefix: str, rows: BounceRows) -> None:
        self._process = process
        self._store = store
        self._prefix = prefix
        self._rows = rows
        code = store.register_buffer(rows.memory.address, rows.memory.nbytes)
        if code:
            process.leave()
            raise Unreachable(f"Mooncake's client can't register memory ({code})")

    def test(self) -> str:
        name = f"{self._prefix}self-test:{np.random.default_rng().bytes(16).hex()}"
        row = np.frombuffer(self._rows.memory.owner, np.uint8)[: self._rows.value_bytes]  # type: ignore[call-overload]
        probe = np.random.default_rng().integers(0, 256, len(row), np.uint8)
        row[:] = probe
        begin = [self._rows.memory.address]
        (code,) = self._store.batch_put_from([name], begin, [len(row)])
        if code == NO_ROOM:
            raise Unreachable(
                "the store has no memory; start a process that lends it some, or set segment_bytes"
            )
        if code:
            raise Unreachable(f"a write failed ({code})")
        row[:] = 0
        (found,) = self._store.batch_get_into([name], begin, [len(row)])
        self._store.remove(name, True)
        if found < 0:
            raise Unreachable(f"a read failed ({found})")
        if found != len(row) or (row != probe).any():
            raise Unsound("it does not give back what it was given; use a Mooncake of 0.3.13")
        return "answers"

    def find(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        codes = self._store.batch_is_exist(self._names(keys))
        return [THERE if code == 1 else ABSENT if code == 0 else FAILED for code in codes]

    def read(self, keys: Sequence[BlockKey], begins: Addresses) -> list[Arrived]:
        names, size = self._names(keys), self._rows.value_bytes
        with self._process.turn():
            found = self._store.batch_get_into(names, begins.tolist(), [size] * len(names))
        arrived, is_answering = [], NO_ANSWER not in found
        for name, code in zip(names, found, strict=True):
            there = code
            if is_answering and code < 0 and code not in GONE:  # perhaps the value is too long
                there = self._store.get_size(name)
                is_answering = there != NO_ANSWER
            arrived.append(self._arrived(code, there))
        return arrived

    def _arrived(self, code: int, there: int) -> Arrived:
        """Return what a read has brought.

        code: result of the read.
        there: size of the value, or an error code.
        """
        if 0 <= code <= self._rows.value_bytes:
            return code
        if code in GONE:
            return ABSENT
        return DAMAGED if there > self._rows.value_bytes else FAILED

    def write(
        self,
        keys: Sequence[BlockKey],
        begins: Addresses,
        sizes: Sequence[int],
        is_wanted: IsWanted,
    ) -> list[Outcome]:
        names = self._names(keys)
        with self._process.turn():
            if not is_wanted():
                return [FAILED] * len(names)
            codes = self._store.batch_put_from(names, begins.tolist(), [*sizes])
        if not is_wanted():
            self.remove(keys)
        return [THERE if code in (0, IS_THERE) else FAILED for code in codes]

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Remove keys even if they are leased; readers of a removed key get a miss."""
        codes = set()
        for name in self._names(keys):
            codes.add(self._store.remove(name, True))
            if NO_ANSWER in codes:
                break  # the other keys would get no answer either
        if codes := codes - {0, *GONE}:
            raise Unreachable(f"the store says {min(codes)}")

    def close(self) -> None:
        with suppress(Exception):
            self._store.unregister_buffer(self._rows.memory.address)
        self._process.leave()

    def _names(self, keys: Sequence[BlockKey]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]


def _address_towards(host: str, port: int) -> str:
    """Return this machine's address as seen from ``host``. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as line:
        line.connect(address)
        return str(line.getsockname()[0])


def _knock(address: str, master: str) -> None:
    """Check that a separate process gets an answer. Raises ``Unreachable``."""
    try:
        ended = run_module(KNOCK, address, master, timeout_s=KNOCK_S)
    except Overdue:
        raise Unreachable(f"its master has not answered within {KNOCK_S:g} s") from None
    except OSError as error:
        raise Unreachable(f"no process can be begun that asks its master: {error}") from error
    if ended.code:
        raise Unreachable(f"its master was asked, and {ended}")
