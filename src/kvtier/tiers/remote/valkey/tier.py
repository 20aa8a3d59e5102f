"""``storage="valkey://host"``: blocks as values in a Valkey or Redis server, or a cluster.

A look-up fetches the headers of all blocks in one round trip. Values are transferred directly
between the server's socket and the memory of the blocks. The server evicts by its
``maxmemory-policy``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvtier.core.types import BlockKey
from kvtier.devices.base import Finding
from kvtier.tiers.crc_join import block_crcs
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.envelope import HEADER_BYTES, KEY_BYTES, as_keys
from kvtier.tiers.remote.errors import Unreachable
from kvtier.tiers.remote.location import Location, StorePlugin
from kvtier.tiers.remote.store_tier import ABSENT, DAMAGED, FAILED, THERE, StoreTier
from kvtier.tiers.remote.valkey.connection_pool import ValkeyOptions, reason_of
from kvtier.tiers.remote.valkey.resp import Part, ReplyError, RespConnection, command
from kvtier.tiers.remote.valkey.servers import Servers, is_moved, unlink
from kvtier.tiers.storage import Outcome, StorageSite

WINDOW_BYTES: Final = 16 << 20
"""Bytes of requested values not yet received; the server holds them in memory meanwhile."""
VERIFIED_BYTES: Final = 4 << 20
"""Bytes that are received, then verified, at a time."""
ASKED_KEYS: Final = 1024
"""Keys per request of a look-up."""


class ValkeyTier(StoreTier):
    """Blocks as values in a server, or in the servers of a cluster.

    Raises ``ConfigError`` for a server that refuses the credentials, or does not return what it was
    given.
    """

    def __init__(self, site: StorageSite, location: Location, options: ValkeyOptions) -> None:
        self._servers = Servers(location, options)
        super().__init__(site, location, options)
        self._prefix = options.prefix.encode()
        self._age = [b"PX", b"%d" % (1000 * options.max_age_s)] if options.max_age_s else []
        self._state = self._servers.test(self._prefix)

    @property
    def last_error(self) -> str:
        return self._servers.last_error

    # -- blocks ------------------------------------------------------------------------------------

    def _find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        outcomes = [FAILED] * len(keys)

        def look(line: RespConnection, positions: Sequence[int]) -> None:
            for start in range(0, len(positions), ASKED_KEYS):
                asked = positions[start : start + ASKED_KEYS]
                some = [keys[at] for at in asked]
                line.send([self._wants_headers(some)])
                are_there = self._envelope.are_of(line.values(len(some)), some)
                for at, is_there in zip(asked, are_there, strict=True):
                    outcomes[at] = THERE if is_there else ABSENT

        self._servers.each(self._names(keys), look, timeout_s)
        return outcomes

    def _names(self, keys: Sequence[BlockKey]) -> list[bytes]:
        """Return the keys as the servers know them."""
        return [self._prefix + key for key in keys]

    def _wants_headers(self, keys: Sequence[BlockKey]) -> bytes:
        """Return the commands for the headers of all keys; they differ only in the key."""
        blank = bytes(KEY_BYTES)
        one = command(b"GETRANGE", self._prefix + blank, b"0", b"%d" % (HEADER_BYTES - 1))
        start, end = one.split(blank)
        return start + (end + start).join(keys) + end

    def _read(
        self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float
    ) -> tuple[list[Outcome], int]:
        outcomes, num_read = [FAILED] * len(keys), list[int]()

        def read(line: RespConnection, positions: Sequence[int]) -> None:
            found = [FAILED] * len(positions)
            some = [keys[at] for at in positions]
            try:
                num_read.extend(self._receive(line, some, blocks.pick([*positions]), found))
            finally:
                for at, outcome in zip(positions, found, strict=True):
                    outcomes[at] = outcome

        self._servers.each(self._names(keys), read, timeout_s)
        return outcomes, sum(num_read)

    def _receive(
        self,
        line: RespConnection,
        keys: Sequence[BlockKey],
        blocks: Pieces,
        outcomes: list[Outcome],
    ) -> Iterator[int]:
        """Read blocks from one server, and verify them. Yield the stored bytes of each.

        outcomes: of the blocks, set here, also where the connection breaks.
        """
        envelope = self._envelope
        headers = np.empty((len(keys), HEADER_BYTES), np.uint8)
        values = blocks.behind(headers)
        ahead = max(1, WINDOW_BYTES // self.bytes_per_block // 2)
        at_a_time = max(1, VERIFIED_BYTES // self.bytes_per_block)
        arrived: dict[int, int] = {}  # checksum by position
        frame = np.empty(HEADER_BYTES + envelope.coder.most_bytes, np.uint8)

        def verify() -> None:
            if not arrived:
                return
            some, there = as_keys([keys[at] for at in arrived]), blocks.pick([*arrived])
            crcs = np.array([*arrived.values()], np.uint32)
            are_right = envelope.are_blocks(headers[[*arrived]], some, there, crcs)
            # With keys, a plain block is of use to others.
            wrong = ABSENT if envelope.coder.is_encrypting else DAMAGED
            for at, is_right in zip(arrived, are_right.tolist(), strict=True):
                outcomes[at] = THERE if is_right else wrong
            arrived.clear()

        num_asked = 0
        try:
            for start in range(0, len(keys), at_a_time):
                while num_asked < len(keys) and num_asked - start < ahead:
                    some = keys[num_asked : num_asked + ahead]
                    line.send([command(b"GET", name) for name in self._names(some)])
                    num_asked += len(some)
                end = min(start + at_a_time, len(keys))
                places = values.pick(slice(start, end))
                came = line.values_into(places, 1, num_asked - end, frame.data)
                for at, (num_bytes, crc) in enumerate(came, start):
                    yield num_bytes or 0
                    if num_bytes == values.block_bytes:
                        arrived[at] = crc
                    elif num_bytes is None:
                        outcomes[at] = ABSENT
                    else:
                        value, block = frame[:num_bytes], blocks.pick([at])
                        header, stored = value[:HEADER_BYTES].tobytes(), value[HEADER_BYTES:]
                        outcomes[at] = envelope.decode(header, keys[at], stored, block)
                verify()
        finally:
            verify()

    def _write(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        outcomes = [FAILED] * len(keys)
        window = max(1, WINDOW_BYTES // self.bytes_per_block)

        def write(line: RespConnection, positions: Sequence[int]) -> None:
            for start in range(0, len(positions), window):
                some = positions[start : start + window]
                self._send(line, [keys[at] for at in some], blocks.pick([*some]))
                for at in some:
                    outcomes[at] = self._was_put(line)

        self._servers.each(self._names(keys), write, timeout_s)
        return outcomes

    def _send(self, line: RespConnection, keys: Sequence[BlockKey], blocks: Pieces) -> None:
        if not self._envelope.coder.changes_blocks:
            headers = self._envelope.headers(keys, blocks, block_crcs(blocks))
            for at, header in enumerate(headers):
                self._set(line, keys[at], [header, *blocks.views(at)])
            return
        for at, key in enumerate(keys):
            self._set(line, key, self._encoded(key, blocks.pick([at])))

    def _encoded(self, key: BlockKey, block: Pieces) -> list[Part]:
        """Return header and content of a block's value."""
        frame = self._envelope.coder.buffer()
        head = self._envelope.coder.encode(key, block, frame)
        if head is None:
            (header,) = self._envelope.headers([key], block, block_crcs(block))
            return [header, *block.views(0)]
        frame = frame[: head.num_bytes]
        return [self._envelope.coded_header(key, head, frame), frame.data]

    def _set(self, line: RespConnection, key: BlockKey, value: list[Part]) -> None:
        num_words, name = 3 + len(self._age), self._prefix + key
        words = (num_words, len(name), name, sum(map(len, value)))
        start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % words
        end = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in self._age)
        line.send([start + value[0], *value[1:], end])

    def _was_put(self, line: RespConnection) -> Outcome:
        try:
            return THERE if line.reply() == b"OK" else FAILED
        except ReplyError as error:
            if is_moved(error):
                raise
            self._servers.last_error = reason_of(error)  # it is full
            return FAILED

    def _remove(self, keys: Sequence[BlockKey], timeout_s: float) -> None:
        names = self._names(keys)

        def remove(line: RespConnection, positions: Sequence[int]) -> None:
            unlink(line, [names[at] for at in positions])

        if error := self._servers.each(names, remove, timeout_s):
            raise Unreachable(reason_of(error))

    # -- upkeep ------------------------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        state = f"{self._location} {self._state}"
        return [Finding(f"{self.name} tier", state, self._servers.note)]

    def close(self) -> None:
        self._servers.close()


make_valkey = StorePlugin("valkey", ValkeyOptions, ValkeyTier)
"""Makes the tier of a ``valkey://`` or ``redis://`` URL."""
make_valkeys = StorePlugin("valkeys", ValkeyOptions, ValkeyTier)
"""Makes the tier of a ``valkeys://`` or ``rediss://`` URL, over TLS."""
