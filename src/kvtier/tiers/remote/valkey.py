"""``storage="valkey://host"``: blocks in a Valkey or Redis server, a key and a value each.

A look-up fetches the headers of all blocks in one round trip; values go straight between the
server's socket and the memory of the blocks. Nothing is deleted but what is damaged, or dropped for
good: the server's ``maxmemory-policy`` makes room.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Final

from kvtier.devices.base import Finding
from kvtier.errors import ConfigError, TierError
from kvtier.process import OwnerProcess
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.envelope import HEADER_BYTES, KEY_BYTES, Envelope
from kvtier.tiers.remote.location import Location, StoreOptions, read_location, read_options
from kvtier.tiers.remote.resp import Connection, Part, ReplyError, RespError, command
from kvtier.tiers.storage import Outcome, StorageFacts, StorageSite, StorageTier
from kvtier.tiers.wrappers import ThrottledTier
from kvtier.types import BlockKey, BlockName

PORT: Final = 6379
PASSWORDS: Final = ("VALKEYCLI_AUTH", "REDISCLI_AUTH")
"""Environment variables that the servers' own tools read."""
CONNECT_S: Final = 1.0
OPEN_S: Final = 2.0
LONGEST_S: Final = 3600.0
WINDOW_BYTES: Final = 16 << 20
"""Of values that were asked for and have not come: the server keeps them in memory meanwhile."""
VERIFIED_BYTES: Final = 1 << 20
"""Are verified at a time, while they are in the processor's cache."""
ASKED_KEYS: Final = 1024
"""In one go."""
REFUSALS: Final = ("NOAUTH", "WRONGPASS", "NOPERM", "ERR AUTH", "ERR DB index", "ERR invalid DB")
"""Errors that another try does not mend."""

THERE, ABSENT, DAMAGED, FAILED = Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyOptions(StoreOptions):
    prefix: str = "kvtier:"
    """Of all keys."""
    max_age_s: int = 0
    """After which a block goes, whatever room there is; 0 for never."""
    ca_file: str = ""
    """Who may have signed the server's certificate, beside those whom the system trusts."""
    cert_file: str = ""
    """A certificate for this client, with its key."""


def make_valkey(site: StorageSite) -> StorageTier:
    """For ``valkey://`` and ``redis://``."""
    return _make("valkey", site)


def make_valkeys(site: StorageSite) -> StorageTier:
    """For ``valkeys://`` and ``rediss://``: over TLS."""
    return _make("valkeys", site)


def _make(scheme: str, site: StorageSite) -> StorageTier:
    location = read_location(scheme, site.location)
    options = read_options(ValkeyOptions, location)
    tier = ValkeyTier(site, location, options)
    return ThrottledTier(tier, options.bytes_per_s) if options.bytes_per_s else tier


class ValkeyTier(StorageTier):
    """Any process may read and write the same server: a block is the same whoever has put it.

    A server that can't be reached is tried again with the next call. Raises ``ConfigError`` for one
    that refuses who we are, or that does not give back what it was given.
    """

    def __init__(self, site: StorageSite, location: Location, options: ValkeyOptions) -> None:
        self.name = site.name
        self.bytes_per_block = site.group.bytes_per_block
        self.facts = StorageFacts(
            evicts=True,
            is_shared=True,
            request_s=options.request_s,
            num_readers=options.readers,
            num_writers=options.writers,
        )
        if not location.host:
            raise ConfigError(f'storage: {location}: no server; write it as "valkey://host"')
        self._num_blocks = site.capacity_bytes // self.bytes_per_block
        self._location = location
        self._prefix = options.prefix.encode()
        self._age = [b"PX", b"%d" % (1000 * options.max_age_s)] if options.max_age_s else []
        self._envelope = Envelope(self.bytes_per_block, options.secret())
        self._tls = _tls(options, location) if location.scheme == "valkeys" else None
        self._process = OwnerProcess()
        self._idle: list[Connection] = []
        self._lock = Lock()
        self._is_closed = False
        self._state = self._test()

    def __repr__(self) -> str:
        return f"ValkeyTier({self._location})"

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    # -- blocks ------------------------------------------------------------------------------------

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        outcomes = [FAILED] * len(keys)

        def look(line: Connection) -> None:
            for start in range(0, len(keys), ASKED_KEYS):
                some = keys[start : start + ASKED_KEYS]
                line.send([self._wants_headers(some)])
                are_there = self._envelope.are_of(line.values(len(some)), some)
                outcomes[start : start + len(some)] = [
                    THERE if is_there else ABSENT for is_there in are_there
                ]

        self._use(look, timeout_s)
        return outcomes

    def _wants_headers(self, keys: Sequence[BlockKey]) -> bytes:
        """A command for each; they differ in nothing but the key."""
        blank = bytes(KEY_BYTES)
        one = command(b"GETRANGE", self._prefix + blank, b"0", b"%d" % (HEADER_BYTES - 1))
        start, end = one.split(blank)
        return start + (end + start).join(keys) + end

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        outcomes = [FAILED] * len(keys)
        ahead = max(1, WINDOW_BYTES // self.bytes_per_block // 2)
        num_verified = max(1, VERIFIED_BYTES // self.bytes_per_block)
        arrived: dict[int, bytes] = {}  # headers, by position

        def read(line: Connection) -> None:
            num_asked = 0
            for at in range(len(keys)):
                if num_asked < len(keys) and num_asked - at < ahead:
                    some = keys[num_asked : num_asked + ahead]
                    line.send([command(b"GET", self._prefix + key) for key in some])
                    num_asked += len(some)
                header = self._read(line, blocks.views(at))
                if isinstance(header, bytes):
                    arrived[at] = header
                else:
                    outcomes[at] = header
                if len(arrived) == num_verified:
                    self._verify(arrived, keys, blocks, outcomes)

        self._use(read, timeout_s)
        self._verify(arrived, keys, blocks, outcomes)
        self._forget([key for key, each in zip(keys, outcomes, strict=True) if each is DAMAGED])
        return outcomes

    def _read(self, line: Connection, into: list[memoryview]) -> bytes | Outcome:
        """The header of the value that comes next, and its block to where it belongs."""
        num_bytes = line.value_bytes()
        if num_bytes is None:
            return ABSENT
        if num_bytes != HEADER_BYTES + self.bytes_per_block:
            line.skip(num_bytes)
            line.end_value()
            return DAMAGED
        header = bytearray(HEADER_BYTES)
        line.read_into(memoryview(header))
        for view in into:
            line.read_into(view)
        line.end_value()
        return bytes(header)

    def _verify(
        self,
        arrived: dict[int, bytes],
        keys: Sequence[BlockKey],
        blocks: Pieces,
        outcomes: list[Outcome],
    ) -> None:
        if arrived:
            some = [keys[at] for at in arrived]
            are_right = self._envelope.are_blocks(
                [*arrived.values()], some, blocks.pick([*arrived])
            )
            for at, is_right in zip(arrived, are_right, strict=True):
                outcomes[at] = THERE if is_right else DAMAGED
            arrived.clear()

    def _forget(self, damaged: Sequence[BlockKey]) -> None:
        """Or nobody could put the right ones there."""
        if damaged:
            self._use(partial(self._unlink, damaged), CONNECT_S)

    def _unlink(self, keys: Sequence[BlockKey], line: Connection) -> None:
        line.send([command(b"UNLINK", *(self._prefix + key for key in keys))])
        line.reply()

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        ends_at = time.monotonic() + timeout_s
        outcomes = self.find([name.key for name in names], timeout_s)
        new = [at for at, outcome in enumerate(outcomes) if outcome is ABSENT]
        if not new:
            return outcomes
        outcomes = [THERE if each is THERE else FAILED for each in outcomes]
        window = max(1, WINDOW_BYTES // self.bytes_per_block)

        def write(line: Connection) -> None:
            for start in range(0, len(new), window):
                some = new[start : start + window]
                self._write(line, [names[at].key for at in some], blocks.pick(some))
                for at in some:
                    outcomes[at] = self._was_put(line)

        self._use(write, ends_at - time.monotonic())
        return outcomes

    def _write(self, line: Connection, keys: Sequence[BlockKey], blocks: Pieces) -> None:
        num_words = 3 + len(self._age)
        num_bytes = HEADER_BYTES + self.bytes_per_block
        end = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in self._age)
        for at, header in enumerate(self._envelope.headers(keys, blocks)):
            key = self._prefix + keys[at]
            words = (num_words, len(key), key, num_bytes)
            start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % words
            parts: list[Part] = [start + header, *blocks.views(at), end]
            line.send(parts)

    def _was_put(self, line: Connection) -> Outcome:
        try:
            return THERE if line.reply() == b"OK" else FAILED
        except ReplyError:  # it is full, or only to be read
            return FAILED

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        if not keys or not for_good:
            return  # others may have it still, and the server makes room
        if error := self._use(partial(self._unlink, keys), CONNECT_S):
            raise TierError(self.name, "drop", str(error)) from error

    # -- connections -------------------------------------------------------------------------------

    def _use(self, work: Callable[[Connection], None], timeout_s: float) -> Exception | None:
        """Do ``work`` with a connection that nobody else uses meanwhile. Returns what went wrong
        with it; it is of no use any more then."""
        line: Connection | None = None
        try:
            line = self._take(time.monotonic() + min(timeout_s, LONGEST_S))
            work(line)
        except (OSError, ReplyError) as error:
            if line is not None:
                line.close()
            return error
        except BaseException:
            if line is not None:
                line.close()
            raise
        self._give_back(line)
        return None

    def _take(self, ends_at: float) -> Connection:
        if ends_at <= time.monotonic():
            raise RespError("it took too long")
        with self._lock:
            if self._is_closed:
                raise RespError("the tier is closed")
            if not self._process.is_here:  # a forked child has its parent's connections
                self._process, self._idle = OwnerProcess(), []
            line = self._idle.pop() if self._idle else None
        if line is None:
            return self._connect(ends_at)
        line.until(ends_at)
        return line

    def _give_back(self, line: Connection) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(line)
                return
        line.close()

    def _connect(self, ends_at: float) -> Connection:
        at = self._location
        line = Connection(
            at.host, at.port or PORT, self._tls, min(ends_at, time.monotonic() + CONNECT_S)
        )
        try:
            password = at.password or next(
                (os.environ[n] for n in PASSWORDS if n in os.environ), ""
            )
            if password:
                line.send([command(b"AUTH", *_words(at.user), password.encode())])
                line.reply()
            if at.path:
                line.send([command(b"SELECT", at.path.encode())])
                line.reply()
            line.until(ends_at)
        except BaseException:
            line.close()
            raise
        return line

    # -- upkeep ------------------------------------------------------------------------------------

    def _test(self) -> str:
        """Whether the server can be used: how it answers, in words."""
        key, value = self._prefix + b"self-test:" + os.urandom(16), os.urandom(HEADER_BYTES)
        try:
            line = self._connect(time.monotonic() + OPEN_S)
        except ReplyError as error:
            raise ConfigError(f"storage: {self._location} refuses: {_kind(error)}") from None
        except OSError as error:
            return f"not reached: {_reason(error)}"
        try:
            line.send([command(b"SET", key, value, b"PX", b"60000")])
            line.reply()
            line.send([command(b"GETRANGE", key, b"1", b"4"), command(b"GET", key)])
            part, whole = line.reply(), line.reply()
            line.send([command(b"UNLINK", key)])
            num_gone = line.reply()
            policy = self._policy(line)
        except ReplyError as error:
            line.close()
            if str(error).startswith(REFUSALS):
                raise ConfigError(f"storage: {self._location} refuses: {_kind(error)}") from None
            return f"can't be written: {_kind(error)}"
        except OSError as error:
            line.close()
            return f"not reached: {_reason(error)}"
        self._give_back(line)
        if (part, whole, num_gone) != (value[1:5], value, 1):
            raise ConfigError(
                f"storage: {self._location} does not give back what it was given; use a Valkey or "
                "Redis server"
            )
        return f"answers{policy}"

    def _policy(self, line: Connection) -> str:
        """A remark where the server would rather be full than forget."""
        line.send([command(b"CONFIG", b"GET", b"maxmemory-policy")])
        try:
            found = line.reply()
        except ReplyError:  # not everybody may ask
            return ""
        if isinstance(found, list) and found[1:] == [b"noeviction"]:
            return "; it keeps what it has when it is full: set its maxmemory-policy to allkeys-lru"
        return ""

    def findings(self) -> list[Finding]:
        tls = "with TLS" if self._tls else ""
        return [Finding(f"{self.name} tier", f"{self._location} {self._state}", tls)]

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()


def _words(user: str | None) -> list[bytes]:
    return [user.encode()] if user else []


def _kind(error: ReplyError) -> str:
    """Its first word: what follows may repeat what was sent."""
    return str(error).split(" ", 1)[0] or "error"


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _tls(options: ValkeyOptions, location: Location) -> ssl.SSLContext:
    try:
        made = ssl.create_default_context(cafile=options.ca_file or None)
        if options.cert_file:
            made.load_cert_chain(options.cert_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"storage: {location}: ca_file, cert_file: {_reason(error)}; name files in PEM"
        ) from None
    return made
