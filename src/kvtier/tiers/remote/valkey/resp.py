"""Connection to a server that speaks RESP2, such as Valkey and Redis.

Values are sent from and received into the caller's memory. They are not copied, except the first
bytes of some.

Source: the protocol's specification, valkey.io/topics/protocol.
"""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice, repeat
from struct import pack
from typing import Final

import numpy as np

from kvtier.core.hot import receive_values
from kvtier.tiers.crc_join import block_crcs
from kvtier.tiers.pieces import Pieces

BUFFER_BYTES: Final = 16 << 10
"""Buffer for replies without memory of the caller's. Bytes of values that arrive in it are copied
once more."""
SMALL_BYTES: Final = 4 << 10
"""Smaller reads go through the buffer, together with what follows."""
LEAST_SHARE: Final = 0.75
"""The socket's timeout is lowered when less than this share of it is left."""
MAX_PARTS: Final = 512
"""Parts of a message passed to the system in one call."""
MAX_REPLY_BYTES: Final = 64 << 20
"""Total size of the strings of one reply. The server's length is allocated, so it is bounded."""
MAX_ITEMS: Final = 1 << 20
"""Total entries of the arrays of one reply. A page of SCAN has some thousand."""
MAX_DEPTH: Final = 4
"""Nesting depth of arrays. A page of SCAN has two."""
MAX_SKIPPED_BYTES: Final = 64 << 20
"""Up to this size, a value of unexpected length is skipped; for a longer one the connection is
closed."""
TOO_LATE: Final = "it took too long"
CLOSED: Final = "the server has closed the connection"
NO_END: Final = "a value does not end where it should"
OTHER_KIND: Final = "a reply of another kind"
NO_RESP: Final = "this is no RESP server"
TOO_LARGE: Final = "a reply is larger than any that was asked for"
REASONS: Final = {errno.ETIMEDOUT: TOO_LATE, errno.ECONNRESET: CLOSED, errno.EPROTO: NO_END}

NUMBER: Final = re.compile(rb"[+-]?[0-9]{1,19}")

Part = bytes | memoryview
Reply = bytes | int | list[object] | None


class ReplyError(Exception):
    """The server replied with an error."""


def is_of_the_key(error: ReplyError) -> bool:
    """Whether the error is only about one key: it does not hold a string, or is on its way."""
    return str(error).startswith("WRONGTYPE") or is_on_its_way(error)


def is_on_its_way(error: ReplyError) -> bool:
    """Whether a key is being moved to another server of a cluster."""
    return str(error).startswith(("ASK", "TRYAGAIN"))


class RespError(OSError):
    """The connection cannot be used any more.

    It was closed, exceeded its time limit, or does not speak RESP.
    """


def command(*words: bytes) -> bytes:
    """Return a command, serialised."""
    return b"".join((b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)))


class RespConnection:
    """A connection. Used by one thread at a time.

    ``until`` sets the deadline of calls. Exceeding it, and any other failure, raises ``RespError``;
    discard the connection then.

    tls: None for a plain connection.
    Raises ``OSError`` if nothing answers by ``ends_at`` (``monotonic``).
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, ends_at: float) -> None:
        self.host = host
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._first = self._end = 0  # unread part of the buffer
        self._left_bytes, self._left_items = 0, 0  # of the current reply
        made = socket.create_connection((host, port), max(0.001, ends_at - time.monotonic()))
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                made = tls.wrap_socket(made, server_hostname=host)
        except BaseException:
            made.close()
            raise
        self._socket = made
        self._is_plain = tls is None
        self.until(ends_at)

    def until(self, ends_at: float) -> None:
        """Set the deadline of calls."""
        self._ends_at = ends_at
        self._limit(max(0.001, ends_at - time.monotonic()))

    @property
    def is_stale(self) -> bool:
        """Whether the server has closed this idle connection, or sent what was not asked for."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _limit(self, seconds: float) -> None:
        """Set the time limit of a single system call."""
        self._limit_s = seconds
        if not self._is_plain:
            self._socket.settimeout(seconds)
            return
        # The kernel waits for whole values, which saves a system call per part.
        limit = pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _left_s(self) -> float:
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise RespError(TOO_LATE)
        left_s = max(left_s, 0.001)
        if left_s < LEAST_SHARE * self._limit_s:  # rarely: it is a system call
            self._limit(left_s)
        return left_s

    # -- sending -----------------------------------------------------------------------------------

    def send(self, parts: Sequence[Part]) -> None:
        """Send all parts in order."""
        left = iter(parts)
        while some := [memoryview(part) for part in islice(left, MAX_PARTS)]:
            if self._is_plain:
                self._send(some)
            else:
                for part in some:
                    self._socket.sendall(part)

    def _send(self, parts: list[memoryview]) -> None:
        at = 0
        while at < len(parts):
            try:
                num_sent = self._socket.sendmsg(parts[at:])
            except BlockingIOError:
                raise RespError(TOO_LATE) from None
            while at < len(parts) and num_sent >= len(parts[at]):
                num_sent -= len(parts[at])
                at += 1
            if at < len(parts):
                self._left_s()
                parts[at] = parts[at][num_sent:]

    # -- replies -----------------------------------------------------------------------------------

    def execute(self, *words: bytes) -> Reply:
        """Send a command, and return its reply; see ``reply``."""
        self.send([command(*words)])
        return self.reply()

    def reply(self) -> Reply:
        """Return the next reply, whole.

        Its length, count and depth are checked before memory is allocated for it.

        Raises:
            ReplyError: the server answers with an error.
            RespError: the reply is larger than ``MAX_REPLY_BYTES`` or ``MAX_ITEMS``, deeper than
                ``MAX_DEPTH``, or not RESP.
        """
        self._left_bytes, self._left_items = MAX_REPLY_BYTES, MAX_ITEMS
        return self._reply(0)

    def _reply(self, depth: int) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            if depth:
                raise RespError(NO_RESP)  # the rest would be taken for the next reply
            raise ReplyError(rest.decode(errors="replace"))
        if kind == b":":
            return _number(rest)
        if kind == b"+":
            self._take(len(rest), 0)
            return rest
        if kind not in (b"$", b"*"):
            raise RespError(NO_RESP)
        length = _length(rest)
        if length is None:
            return None
        if kind == b"*":
            self._take(0, length)
            if depth == MAX_DEPTH:
                raise RespError(TOO_LARGE)
            return [self._reply(depth + 1) for _ in range(length)]
        self._take(length, 0)
        value = bytearray(length)
        self._read_into(memoryview(value))
        self._end_value()
        return bytes(value)

    def _take(self, num_bytes: int, num_items: int) -> None:
        """Raise ``RespError`` if so much more is too much for one reply."""
        self._left_bytes -= num_bytes
        self._left_items -= num_items
        if self._left_bytes < 0 or self._left_items < 0:
            raise RespError(TOO_LARGE)

    def values(self, num: int) -> list[bytes | None]:
        """Return the next ``num`` replies, which are short values; None for a missing key.

        Raises:
            ReplyError: the server answers with an error other than that a key has another type.
            RespError: a reply is longer than the buffer, or not a string.
        """
        found: list[bytes | None] = []
        while len(found) < num:
            there = bytes(self._buffer[self._first : self._end])
            at = 0
            while len(found) < num:
                newline = there.find(b"\n", at)
                if newline < 0:
                    break
                end = line_end = newline - 1
                if there[line_end:newline] != b"\r":
                    raise RespError(NO_RESP)
                if there[at] == ord("$"):
                    length = _length(there[at + 1 : line_end])
                    end = line_end if length is None else line_end + 2 + length
                    if end - at > len(self._buffer):
                        raise RespError(TOO_LARGE)
                    if end + 2 > len(there):
                        break
                    if there[end : end + 2] != b"\r\n":
                        raise RespError(NO_END)
                    found.append(None if length is None else there[line_end + 2 : end])
                elif there[at] == ord("-"):
                    error = ReplyError(there[at + 1 : line_end].decode(errors="replace"))
                    if not is_of_the_key(error):
                        raise error
                    found.append(None)
                elif there[at] in b"+:":
                    raise RespError(OTHER_KIND)
                else:
                    raise RespError(NO_RESP)
                at = end + 2
            self._first += at
            if len(found) < num:
                self._fill()
        return found

    def values_into(
        self, places: Pieces, num_heads: int, num_due: int, other: memoryview | None = None
    ) -> Iterator[tuple[int | None, int]]:
        """Receive the next values, each into its place.

        Yields for each its length (None if missing) and the crc32c of its bytes without the first
        ``num_heads`` pieces. A value of another length than its place has 0 for a checksum. Until
        the next one is asked for it is in ``other``, as far as there is room for all of it; else it
        is skipped.

        num_due: replies that come after these.
        Raises ``ReplyError`` like ``reply``.
        """
        at, num = 0, len(places)
        while at < len(places):
            end = min(at + num, len(places))
            due = num_due + len(places) - end
            crcs, error = self._receive_values(places.pick(slice(at, end)), num_heads, due)
            yield from zip(repeat(places.block_bytes), crcs)
            at, num = at + len(crcs), 2 * num
            if error:
                raise RespError(REASONS.get(error) or os.strerror(error))
            if at < end:
                num_bytes, crc = self._value_into(places.pick([at]), num_heads, other)
                yield num_bytes, crc
                if num_bytes is not None and self._is_unread(num_bytes, places, other):
                    raise RespError(TOO_LARGE)
                at, num = at + 1, 1  # more missing values may follow

    def _receive_values(
        self, places: Pieces, num_heads: int, num_due: int
    ) -> tuple[list[int], int]:
        """Receive consecutive values as long as they fill their places.

        Returns their checksums and why no more followed: an error number, or 0 for another reply.
        """
        if not self._is_plain:
            return [], 0
        self._left_s()
        crcs, there, error = receive_values(
            self._socket.fileno(),
            b"$%d\r\n" % places.block_bytes,
            bytes(self._buffer[self._first : self._end]),
            places.addresses.ravel(),
            np.tile(places.sizes.astype(np.uint64), len(places)),
            len(places.sizes),
            num_heads,
            num_due,
            self._ends_at,
        )
        self._buffer[: len(there)] = there
        self._first, self._end = 0, len(there)
        return crcs.tolist(), error

    def _value_into(
        self, place: Pieces, num_heads: int, other: memoryview | None
    ) -> tuple[int | None, int]:
        line, crc = self._line(), 0
        if line[:1] == b"-":
            error = ReplyError(line[1:].decode(errors="replace"))
            if is_on_its_way(error):
                return None, crc
            raise error
        if line[:1] != b"$":
            raise RespError(OTHER_KIND)
        num_bytes = _length(line[1:])
        if num_bytes is None or self._is_unread(num_bytes, place, other):
            return num_bytes, crc
        if num_bytes == place.block_bytes:
            for view in place.views(0):
                self._read_into(view)
            num_head_bytes = int(place.sizes[:num_heads].sum())
            crc = int(block_crcs(place.part(num_head_bytes, num_bytes))[0])
        elif other is not None and num_bytes <= len(other):
            self._read_into(other[:num_bytes])
        else:
            self._skip(num_bytes)
        self._end_value()
        return num_bytes, crc

    def _is_unread(self, num_bytes: int, places: Pieces, other: memoryview | None) -> bool:
        """Whether a value is too long to be skipped, so that its connection is closed."""
        return num_bytes > max(MAX_SKIPPED_BYTES, places.block_bytes, len(other or b""))

    def _read_into(self, view: memoryview) -> None:
        """Receive the next bytes until ``view`` is full."""
        num = 0
        while num < len(view):
            left = len(view) - num
            if self._first == self._end:
                if left >= SMALL_BYTES:
                    num += self._receive(view[num:], is_whole=True)
                    continue
                self._fill()  # may receive more than needed now
            some = min(left, self._end - self._first)
            view[num : num + some] = self._buffer[self._first : self._first + some]
            self._first, num = self._first + some, num + some

    def _skip(self, num_bytes: int) -> None:
        """Skip the next bytes."""
        while num_bytes:
            if self._first == self._end:
                self._fill()
            num = min(num_bytes, self._end - self._first)
            self._first, num_bytes = self._first + num, num_bytes - num

    def _end_value(self) -> None:
        """Read the end mark of a value."""
        end = bytearray(2)
        self._read_into(memoryview(end))
        if end != b"\r\n":
            raise RespError(NO_END)

    def _line(self) -> bytes:
        """Return the next line without its end."""
        while True:
            line, newline, _ = bytes(self._buffer[self._first : self._end]).partition(b"\n")
            if newline:
                break
            self._fill()
        self._first += len(line) + 1
        if line[-1:] != b"\r":
            raise RespError(NO_RESP)
        return line[:-1]

    def _fill(self) -> None:
        """Receive more bytes behind the unread ones."""
        left = self._end - self._first
        if left == len(self._buffer):
            raise RespError(TOO_LARGE)
        self._buffer[:left] = bytes(self._buffer[self._first : self._end])
        self._first, self._end = 0, left
        self._end += self._receive(self._buffer[left:], is_whole=False)

    def _receive(self, view: memoryview, is_whole: bool) -> int:
        """Receive at least one byte into ``view``; return the number."""
        self._left_s()
        flags = socket.MSG_WAITALL if is_whole and self._is_plain else 0
        try:
            num = self._socket.recv_into(view, len(view), flags)
        except (BlockingIOError, TimeoutError):
            raise RespError(TOO_LATE) from None
        if not num:
            raise RespError(CLOSED)
        return num

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


def _number(text: bytes) -> int:
    """Return a signed integer of 64 bits, as RESP has them."""
    if not NUMBER.fullmatch(text) or not -(1 << 63) <= (number := int(text)) < 1 << 63:
        raise RespError(NO_RESP)
    return number


def _length(text: bytes) -> int | None:
    """Return the length of a string or an array; None for a null."""
    length = _number(text)
    if length < -1:
        raise RespError(NO_RESP)
    return None if length < 0 else length
