"""Inspection and removal of blocks in a Valkey or Redis server, without counting as a use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvtier.core.errors import CacheError, ConfigError
from kvtier.core.types import BlockKey
from kvtier.tiers.codecs.frame import HEAD_BYTES, FrameHead
from kvtier.tiers.remote.envelope import CODED_MAGIC, HEADER_BYTES, KEY_BYTES, size_behind
from kvtier.tiers.remote.keeper import Entry, EntryBlocks, StoreKeeper
from kvtier.tiers.remote.location import Location
from kvtier.tiers.remote.valkey.connection_pool import ValkeyOptions, reason_of
from kvtier.tiers.remote.valkey.resp import (
    ReplyError,
    RespConnection,
    RespError,
    command,
    is_of_the_key,
)
from kvtier.tiers.remote.valkey.servers import ANSWERS, Servers, unlink

SCANNED: Final = b"1000"
"""Keys that the server examines per reply."""
PATIENCE_S: Final = 30.0
MAX_PAGES: Final = 1 << 20
"""Limit of a scan's pages: 10^9 keys."""
MAX_ENTRIES: Final = 1 << 24
"""Limit of blocks of a server: 1 TiB in blocks of 64 KiB."""
GLOB: Final = b"\\*?[]"
"""Characters with a meaning in a pattern."""


class ValkeyKeeper(StoreKeeper):
    """Keeper of a server. Keys of the prefix plus exactly 32 bytes are taken for kvtier's."""

    kind = "block"
    age = "not used for {}"

    def __init__(self, location: Location, options: ValkeyOptions) -> None:
        self.where = str(location)
        self._prefix = options.prefix.encode()
        self._servers = Servers(location, options)

    def test(self) -> str:
        state = self._servers.test(self._prefix)
        if not state.startswith(ANSWERS):
            raise CacheError(f"{self.where}: {state}")
        return state

    def entries(self) -> list[Entry]:
        found: dict[bytes, Entry] = {}  # a scan may return a key twice

        def scan(line: RespConnection) -> None:
            self._look_only(line)
            cursor = b"0"
            for _ in range(MAX_PAGES):
                line.until(time.monotonic() + PATIENCE_S)
                cursor, names = self._page(line, cursor)
                names = [name for name in names if len(name) == len(self._prefix) + KEY_BYTES]
                found.update((fact.name, fact) for fact in self._facts(line, names))
                if cursor == b"0":
                    return
                if len(found) > MAX_ENTRIES:
                    break
            raise CacheError(f"{self.where} answers with a scan that does not end")

        self._check(self._servers.every(scan, PATIENCE_S))
        return list(found.values())

    def _page(self, line: RespConnection, cursor: bytes) -> tuple[bytes, list[bytes]]:
        pattern = b"".join(
            b"\\%c" % each if each in GLOB else b"%c" % each for each in self._prefix
        )
        match line.execute(b"SCAN", cursor, b"MATCH", pattern + b"*", b"COUNT", SCANNED):
            case [bytes() as following, list() as names]:
                return following, [name for name in names if isinstance(name, bytes)]
        raise RespError("a reply of another kind")

    def _facts(self, line: RespConnection, names: Sequence[bytes]) -> list[Entry]:
        """Return entries for those keys that still exist and hold strings."""
        asked = ((b"OBJECT", b"IDLETIME", name, b"STRLEN", name) for name in names)
        line.send([command(*each[:3]) + command(*each[3:]) for each in asked])
        found = []
        for name in names:
            idle_s, num_bytes = self._number(line), self._number(line)
            if idle_s is not None and num_bytes:
                found.append(Entry(name, float(idle_s), num_bytes))
        return found

    def blocks(self, entries: Sequence[Entry]) -> list[EntryBlocks | None]:
        starts: list[bytes | None] = [None] * len(entries)
        last = b"%d" % (HEADER_BYTES + HEAD_BYTES - 1)

        def ask(line: RespConnection, positions: Sequence[int]) -> None:
            self._look_only(line)
            line.send([command(b"GETRANGE", entries[at].name, b"0", last) for at in positions])
            for at, start in zip(positions, line.values(len(positions)), strict=True):
                starts[at] = start

        self._check(self._servers.each([entry.name for entry in entries], ask, PATIENCE_S))
        return [_blocks_of(*both) for both in zip(entries, starts, strict=True)]

    def remove(self, entries: Sequence[Entry]) -> None:
        names = [entry.name for entry in entries]

        def remove(line: RespConnection, positions: Sequence[int]) -> None:
            unlink(line, [names[at] for at in positions])

        self._check(self._servers.each(names, remove, PATIENCE_S))

    def _look_only(self, line: RespConnection) -> None:
        """Have commands of this connection not count as uses of blocks."""
        try:
            line.execute(b"CLIENT", b"NO-TOUCH", b"ON")
        except ReplyError:
            raise ConfigError(
                f"{self.where}: this server can't be looked at without its blocks counting as "
                "used (CLIENT NO-TOUCH); it has to be Valkey, or Redis from 7.2 on"
            ) from None

    def _check(self, error: Exception | None) -> None:
        if error is not None:
            raise CacheError(f"{self.where} does not answer: {reason_of(error)}")

    def _number(self, line: RespConnection) -> int | None:
        """Return the next reply, a number; None if the key is gone or has another type."""
        try:
            found = line.reply()
        except ReplyError as error:
            if "LFU" in str(error):
                raise ConfigError(
                    f"{self.where}: with a maxmemory-policy that counts uses this server does not "
                    "know for how long a block was not used; give the replicas max_age_s instead"
                ) from None
            if not is_of_the_key(error):
                raise
            return None
        return found if isinstance(found, int) else None

    def close(self) -> None:
        self._servers.close()


def _blocks_of(entry: Entry, start: bytes | None) -> EntryBlocks | None:
    """Return the block of an entry, by the first bytes of its value; None for no value."""
    key, start = BlockKey(entry.name[-KEY_BYTES:]), start or b""
    header = start[:HEADER_BYTES]
    size = size_behind(header, key)
    if size is None or HEADER_BYTES + size != entry.num_bytes:
        return None
    if not header.startswith(CODED_MAGIC):
        return EntryBlocks(size, [key])
    head = FrameHead.read(np.frombuffer(start[HEADER_BYTES:], np.uint8))
    return None if head is None else EntryBlocks(head.plain_bytes, [key])
