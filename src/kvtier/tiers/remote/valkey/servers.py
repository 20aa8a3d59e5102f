"""A Valkey or Redis server, or the primaries of a cluster, each with the keys of its hash slots.

Source: the cluster specification, valkey.io/topics/cluster-spec.
"""

from __future__ import annotations

import logging
import os
import time
from binascii import crc_hqx
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Lock
from typing import Final

import numpy as np

from kvtier.core.errors import ConfigError
from kvtier.core.system.process import OwnerProcess
from kvtier.tiers.remote.location import Location
from kvtier.tiers.remote.valkey.connection_pool import (
    OPEN_S,
    ConnectionPool,
    ValkeyOptions,
    reason_of,
)
from kvtier.tiers.remote.valkey.resp import ReplyError, RespConnection, RespError, command

logger = logging.getLogger(__name__)

NUM_SLOTS: Final = 1 << 14
"""Hash slots of a cluster."""
MAX_NODES: Final = 1000
"""Most primaries, by the cluster specification."""
NUM_TRIES: Final = 3
"""Rounds of one call, in which keys that have moved are asked for at their new servers."""
ASK_AGAIN_S: Final = 0.2
"""Shortest time between two questions for the owners of slots, after servers that fail."""
NUM_AT_ONCE: Final = 32
"""Servers that are asked at the same time, by all calls together."""
MOVED: Final = ("MOVED", "READONLY", "CLUSTERDOWN")
"""Errors of a server that does not own a key, or does not any more."""
REFUSALS: Final = ("NOAUTH", "WRONGPASS", "NOPERM", "ERR AUTH", "ERR DB index", "ERR invalid DB")
"""Errors that retries cannot fix."""
PROBE_BYTES: Final = 96
ANSWERS: Final = "answers"
"""State of a usable server."""

Address = tuple[str, int]
Work = Callable[[RespConnection, Sequence[int]], object]
"""Sends and receives for the keys at these positions. It may be called again for some of them."""


class Servers:
    """Connections to the servers of a URL. Thread-safe.

    That the server is one of a cluster is learned when it first refuses a key. The URL needs to
    name only one; the others are found through it.

    Raises ``ConfigError`` for a URL without a server, and for unreadable certificates.
    """

    def __init__(self, location: Location, options: ValkeyOptions) -> None:
        self._location = location
        self._options = options
        self._seed = ConnectionPool(location, options)
        self._lock = Lock()
        self._owners: np.ndarray[tuple[int], np.dtype[np.int16]] | None = None
        self._pools: list[ConnectionPool] = []
        self._addresses: list[Address] = []
        self._asked_s = -ASK_AGAIN_S
        self._process = OwnerProcess()
        self._threads: ThreadPoolExecutor | None = None
        self.last_error = ""
        """Reason of the last failure."""

    @property
    def note(self) -> str:
        """ "a cluster with 3 primaries, with TLS", or a part of it, or ""."""
        cluster = f"a cluster with {len(self._pools)} primaries" if self._pools else ""
        return ", ".join(filter(None, (cluster, self._seed.note)))

    def each(self, names: Sequence[bytes], work: Work, timeout_s: float) -> Exception | None:
        """Run ``work`` for the keys of each server, with exclusive use of a connection.

        Servers work at the same time. Keys that have moved are asked for again where they are now.

        Returns the last error, if any; its connection is closed then.
        """
        ends_at = time.monotonic() + timeout_s
        left: Sequence[int] = range(len(names))
        error: Exception | None = None
        for _ in range(NUM_TRIES):
            left, error = self._round(names, left, work, ends_at)
            if error is None or not self._find_owners(error, ends_at):
                break
        if error is not None:
            self.last_error = reason_of(error)
        return error

    def every(self, work: Callable[[RespConnection], object], timeout_s: float) -> Exception | None:
        """Run ``work`` once with each server, one after the other. Return the first error."""
        self._ask_owners(time.monotonic() + OPEN_S)
        for pool in self._pools or [self._seed]:
            if error := pool.use(work, timeout_s):
                return error
        return None

    def _round(
        self, names: Sequence[bytes], left: Sequence[int], work: Work, ends_at: float
    ) -> tuple[Sequence[int], Exception | None]:
        """Return the positions at which work failed, and the last error."""
        parts = self._parts(names, left)

        def run(part: tuple[ConnectionPool, Sequence[int]]) -> Exception | None:
            pool, positions = part
            return pool.use(lambda line: work(line, positions), ends_at - time.monotonic())

        # The caller's own thread works, too. The others use its memory: it waits for all of them.
        others = [self._executor().submit(run, part) for part in parts[1:]]
        try:
            own = run(parts[0])
        finally:
            wait(others)
        errors = [own, *(other.result() for other in others)]
        failed = [
            at
            for (_, positions), error in zip(parts, errors, strict=True)
            if error is not None
            for at in positions
        ]
        return failed, next((error for error in errors if error is not None), None)

    def _parts(
        self, names: Sequence[bytes], left: Sequence[int]
    ) -> list[tuple[ConnectionPool, Sequence[int]]]:
        """Return the servers of keys, each with the positions of its keys."""
        with self._lock:
            owners, pools = self._owners, self._pools
        if owners is None or not len(left):
            return [(self._seed, left)]
        of_keys = owners[[slot_of(names[at]) for at in left]]
        positions = np.asarray(left)
        return [
            (pools[owner], positions[of_keys == owner].tolist())
            for owner in np.unique(of_keys).tolist()
        ]

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None or not self._process.is_here:  # the threads are the parent's
                self._process = OwnerProcess()
                self._threads = ThreadPoolExecutor(NUM_AT_ONCE, "kvtier valkey")
            return self._threads

    # -- owners of slots ---------------------------------------------------------------------------

    def _find_owners(self, error: Exception, ends_at: float) -> bool:
        """Ask for the owners of slots, if an error says that they may have changed.

        Returns whether they have.
        """
        has_moved = isinstance(error, ReplyError) and str(error).startswith(MOVED)
        if self._owners is None and not str(error).startswith(MOVED[0]):
            return False
        now_s = time.monotonic()
        with self._lock:
            if not has_moved and now_s - self._asked_s < ASK_AGAIN_S:
                return False
            self._asked_s = now_s
        return self._ask_owners(ends_at)

    def _ask_owners(self, ends_at: float) -> bool:
        """Ask for the owners of slots. Return whether they have changed."""
        found: list[tuple[list[Address], list[tuple[int, int, int]]]] = []

        def ask(line: RespConnection) -> None:
            found.append(_read_slots(line.execute(b"CLUSTER", b"SLOTS"), line.host))

        for pool in (*self._pools, self._seed):
            timeout_s = min(ends_at - time.monotonic(), OPEN_S)
            if pool.use(ask, timeout_s) is None:
                return self._take_owners(*found[0])
        return False

    def _take_owners(self, addresses: list[Address], slots: list[tuple[int, int, int]]) -> bool:
        owners = np.full(NUM_SLOTS, -1, np.int16)
        for first, last, owner in slots:
            owners[first : last + 1] = owner
        if not addresses:
            return False
        # A slot without an owner is asked for at the first one, which answers CLUSTERDOWN.
        owners[owners < 0] = 0
        with self._lock:
            before = dict(zip(self._addresses, self._pools, strict=True))
            is_same = (
                addresses == self._addresses
                and self._owners is not None
                and np.array_equal(owners, self._owners)
            )
            self._pools = [
                before.pop(each) if each in before else self._pool(*each) for each in addresses
            ]
            self._addresses, self._owners = addresses, owners
        for pool in before.values():
            pool.close()
        if not is_same:
            logger.info("owners of slots store=%s primaries=%d", self._location, len(addresses))
        return not is_same

    def _pool(self, host: str, port: int) -> ConnectionPool:
        return ConnectionPool(replace(self._location, host=host, port=port), self._options)

    # -- upkeep ------------------------------------------------------------------------------------

    def test(self, prefix: bytes) -> str:
        """Test the server of a random key. Return its state in words.

        Raises ``ConfigError`` for a server that refuses the credentials, or does not return what it
        was given.
        """
        key, value = prefix + b"self-test:" + os.urandom(16), os.urandom(PROBE_BYTES)
        answers: list[object] = []
        remark = ""

        def ask(line: RespConnection, _: Sequence[int]) -> None:
            nonlocal remark
            line.execute(b"SET", key, value, b"PX", b"60000")
            line.send([command(b"GETRANGE", key, b"1", b"4"), command(b"GET", key)])
            answers.extend((line.reply(), line.reply()))
            answers.append(line.execute(b"UNLINK", key))
            policy = _execute_if_allowed(line, b"CONFIG", b"GET", b"maxmemory-policy")
            if isinstance(policy, list) and policy[1:] == [b"noeviction"]:
                remark = (
                    "; it keeps what it has when it is full: set its maxmemory-policy to "
                    "allkeys-lru"
                )

        error = self.each([key], ask, OPEN_S)
        if error is None:  # it may be the owner by chance
            self._ask_owners(time.monotonic() + OPEN_S)
        if isinstance(error, ReplyError):
            if str(error).startswith(REFUSALS):
                raise ConfigError(f"storage: {self._location} refuses: {reason_of(error)}")
            return f"can't be written: {reason_of(error)}"
        if error is not None:
            return f"not reached: {reason_of(error)}"
        if answers != [value[1:5], value, 1]:
            raise ConfigError(
                f"storage: {self._location} does not give back what it was given; use a Valkey or "
                "Redis server"
            )
        return f"{ANSWERS}{remark}"

    def close(self) -> None:
        for pool in (self._seed, *self._pools):
            pool.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)


def slot_of(name: bytes) -> int:
    """Return the hash slot of a key. Of a key with ``{...}`` only what is inside counts."""
    start = name.find(b"{") + 1
    if start and (end := name.find(b"}", start)) > start:
        name = name[start:end]
    return crc_hqx(name, 0) % NUM_SLOTS


def is_moved(error: ReplyError) -> bool:
    """Whether a server does not own a key."""
    return str(error).startswith(MOVED)


def unlink(line: RespConnection, names: Sequence[bytes]) -> None:
    """Remove keys. A cluster takes no command with keys of several slots."""
    line.send([b"".join(command(b"UNLINK", name) for name in names)])
    for _ in names:
        line.reply()


def _read_slots(reply: object, asked: str) -> tuple[list[Address], list[tuple[int, int, int]]]:
    """Return the primaries, and ranges of slots: the first, the last, and the primary's number.

    asked: host of the server that replied, which may name itself by an empty string.
    Raises ``RespError`` for any other reply than of ``CLUSTER SLOTS``.
    """
    addresses: dict[Address, int] = {}
    slots = []
    for each in reply if isinstance(reply, list) else [reply]:
        match each:
            case [int(first), int(last), [host, int(port), *_], *_] if (
                0 <= first <= last < NUM_SLOTS and 0 < port < 1 << 16
            ):
                name = host.decode(errors="replace") if isinstance(host, bytes) else ""
                owner = addresses.setdefault((name or asked, port), len(addresses))
                slots.append((first, last, owner))
            case _:
                raise RespError("a reply of another kind")
    if len(addresses) > MAX_NODES or len(slots) > NUM_SLOTS:
        raise RespError("a cluster larger than any")
    return list(addresses), slots


def _execute_if_allowed(line: RespConnection, *words: bytes) -> object:
    """Return a reply; None if this user may not run the command."""
    try:
        return line.execute(*words)
    except ReplyError:
        return None
