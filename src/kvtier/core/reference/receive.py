"""Reception of consecutive RESP values from a server directly into their memory."""

from __future__ import annotations

import ctypes
import errno
import operator
import os
import socket
import time
from struct import pack
from typing import TYPE_CHECKING

import numpy as np

from kvtier.core.reference.arguments import pieces_of
from kvtier.core.reference.crc import crc32c

if TYPE_CHECKING:
    from numpy.typing import NDArray

END = b"\r\n"
LEAST_REPLY_BYTES = 3
"""Length of the shortest reply: an error without text, ``-\\r\\n``."""
MAX_PARTS = 1024
LEAST_WAIT_S = 0.001


def receive_values(
    fd: int,
    line: bytes,
    held: bytes,
    addresses: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    pieces: int,
    heads: int,
    due: int,
    until: float,
) -> tuple[NDArray[np.uint32], bytes, int]:
    """Receive values that begin with ``line``, each into its pieces, until another reply comes.

    Args:
        fd: descriptor of a blocking socket.
        line: header line of a value that fills its pieces.
        held: bytes that were received before.
        addresses: uint64 [num_values * pieces], C-contiguous, address of each piece.
        sizes: uint64 [num_values * pieces], C-contiguous, bytes of each piece.
        pieces: number of pieces of a value.
        heads: number of pieces at the start of a value that are left out of its checksum.
        due: number of replies that follow these values.
        until: deadline (``time.monotonic``).

    Returns:
        The crc32c of each complete value, which are the first ones: uint32 [n]; bytes that were
        received after them; and an errno. ETIMEDOUT: the deadline has passed. ECONNRESET: the
        server has closed the connection. EPROTO: a value does not end in the right place. 0: all
        values were received, or another reply came. That reply is in the returned bytes, and none
        of it was written to pieces.

    Raises:
        TypeError, ValueError: an argument is invalid; nothing was received.
    """
    memory = pieces_of(addresses, sizes)
    if operator.index(pieces) < 1 or len(memory) % pieces:
        raise ValueError(f"{len(memory)} pieces are no whole number of values of {pieces} pieces")
    if not 0 <= operator.index(heads) <= pieces:
        raise ValueError(f"heads must be between 0 and pieces={pieces}, not {heads}")
    if not line:
        raise ValueError("line is empty")
    if operator.index(due) < 0:
        raise ValueError(f"due must not be negative: {due}")
    if until != until:
        raise ValueError("until is not a number")
    values = [memory[at : at + pieces] for at in range(0, len(memory), pieces)]
    num, rest, number = 0, held, 0
    try:
        with socket.socket(fileno=os.dup(fd)) as its:  # shares the socket and its timeout
            reader = _Reader(its, line, held, until)
            try:
                while num < len(values) and reader.is_next():
                    num_ahead = min((len(values) - num - 1 + due) * LEAST_REPLY_BYTES, len(line))
                    late = reader.read_value(values[num], num_ahead)
                    num += 1
                    if late is not None:
                        raise late
            finally:
                rest = reader.rest
    except OSError as error:
        number = error.errno or errno.EIO
    crcs = []
    for value in values[:num]:
        crc = 0
        for piece in value[heads:]:
            crc = crc32c(*piece, crc)
        crcs.append(crc)
    return np.array(crcs, np.uint32), rest, number


class _Reader:
    """Reader of consecutive values. rest: bytes that were received, but not consumed yet."""

    def __init__(self, its: socket.socket, line: bytes, held: bytes, until: float) -> None:
        self._socket = its
        self._line = line
        self._until = until
        self.rest = held

    def is_next(self) -> bool:
        """Return whether a value comes next. If so, consume its header line."""
        while len(self.rest) < len(self._line) and self._line.startswith(self.rest):
            more = bytearray(len(self._line) - len(self.rest))
            num = self._receive([memoryview(more)])
            self.rest += more[:num]
        if not self.rest.startswith(self._line):
            return False
        self.rest = self.rest[len(self._line) :]
        return True

    def read_value(self, pieces: list[tuple[int, int]], num_ahead: int) -> OSError | None:
        """Read the next value into its pieces, and up to ``num_ahead`` bytes after its end.

        Returns the error that occurred while the bytes after the value were received, if any.
        """
        parts = []
        for address, size in pieces:
            place = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            some = self.rest[: len(place)]
            place[: len(some)] = some
            self.rest = self.rest[len(some) :]
            parts.append(place[len(some) :])
        more = bytearray(max(0, len(END) + num_ahead - len(self.rest)))
        parts.append(memoryview(more))
        left, late = self._fill([part for part in parts if part])
        self.rest += more[: max(0, len(more) - left)]
        if not self.rest.startswith(END):
            raise late or OSError(errno.EPROTO, "a value does not end where it should")
        self.rest = self.rest[len(END) :]
        return late

    def _fill(self, parts: list[memoryview]) -> tuple[int, OSError | None]:
        """Fill ``parts``. Return how many bytes are missing, and the error."""
        while parts:
            try:
                num = self._receive(parts[:MAX_PARTS])
            except OSError as error:
                return sum(map(len, parts)), error
            while parts and num >= len(parts[0]):
                num -= len(parts.pop(0))
            if num:
                parts[0] = parts[0][num:]
        return 0, None

    def _receive(self, parts: list[memoryview]) -> int:
        """Receive at least one byte into ``parts``, before the deadline."""
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise OSError(errno.ETIMEDOUT, "it took too long")
        left_s = max(left_s, LEAST_WAIT_S)
        limit = pack("ll", int(left_s), int(left_s % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        try:
            num = self._socket.recvmsg_into(parts)[0]
        except BlockingIOError:
            raise OSError(errno.ETIMEDOUT, "it took too long") from None
        if num == 0:
            raise OSError(errno.ECONNRESET, "the server has closed the connection")
        return num
