"""Values off a socket, each to its place: one suite for the native core and its Python twin."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from threading import Thread

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core import hot
from kvtier.core.reference.receive import receive_values as reference_receive_values
from tests.native.twins import both

Receive = Callable[..., tuple[npt.NDArray[np.uint32], bytes, int]]
UNTOUCHED = 0xEE
SOON_S = 30.0
REPLIES = (b"$-1\r\n", b"-E\r\n", b"$0\r\n\r\n", b"+OK\r\n", b":12\r\n", b"*1\r\n$1\r\nx\r\n")
"""Replies that are none of the values that are waited for."""


receive_values = both(reference_receive_values, "receive_values")


def received(
    function: Receive, line: socket.socket, places: Places, held: bytes, due: int, until: float
) -> tuple[int, bytes, int]:
    """Return the number of values received, the rest, the error, and the checksums."""
    heads = len(places.sizes) // 2
    crcs, rest, error = function(
        line.fileno(), line_of(places.num_bytes), held, *places.arguments, heads, due, until
    )
    assert crcs.dtype == np.uint32
    assert crcs.tolist() == [places.crc(at, heads) for at in range(len(crcs))]
    return len(crcs), rest, error


@contextmanager
def sending(*parts: bytes, pause_s: float = 0.0, is_open: bool = True) -> Iterator[socket.socket]:
    """Yield a socket to which a thread sends these parts, and then nothing."""
    here, there = socket.socketpair()

    def send() -> None:
        with suppress(OSError):  # the receiver has closed
            for part in parts:
                there.sendall(part)
                time.sleep(pause_s)
        if not is_open:
            there.close()

    sender = Thread(target=send)
    with closing(here), closing(there):
        sender.start()
        yield here
        here.close()
        sender.join()


class Places:
    """Memory for values in pieces, apart from each other."""

    def __init__(self, num: int, sizes: Sequence[int]) -> None:
        self.sizes = np.array(sizes, np.uint64)
        self.num_bytes = int(self.sizes.sum())
        apart = self.num_bytes + 16 * len(sizes)
        self._rows = np.full((num, apart), UNTOUCHED, np.uint8)
        self._shifts = np.cumsum(self.sizes) - self.sizes + 16 * np.arange(len(sizes), dtype="u8")
        begins = self._rows.ctypes.data + apart * np.arange(num, dtype="u8")
        self.addresses = (begins[:, None].astype("u8") + self._shifts).ravel()

    @property
    def arguments(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], int]:
        return self.addresses, np.tile(self.sizes, len(self._rows)), len(self.sizes)

    def value(self, at: int) -> bytes:
        row, ends = self._rows[at], self._shifts + self.sizes
        pieces = zip(self._shifts.tolist(), ends.tolist(), strict=True)
        return b"".join(row[begin:end].tobytes() for begin, end in pieces)

    def crc(self, at: int, heads: int) -> int:
        """Return the checksum of a value without its first pieces."""
        content = np.frombuffer(self.value(at)[int(self.sizes[:heads].sum()) :] or b"-", np.uint8)
        return hot.crc32c(content.ctypes.data, int(self.sizes[heads:].sum()))

    def num_touched(self) -> int:
        return int((self._rows != UNTOUCHED).sum())


def line_of(num_bytes: int) -> bytes:
    return b"$%d\r\n" % num_bytes


def reply_of(value: bytes) -> bytes:
    return line_of(len(value)) + value + b"\r\n"


def value_of(number: int, num_bytes: int) -> bytes:
    """Return a value in which no byte equals untouched memory."""
    return bytes((number * 7 + at) % 200 for at in range(num_bytes))


def rest_of(line: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        found += line.recv(num_bytes - len(found))
    return found


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any),
    num_good=st.integers(0, 6),
    behind=st.lists(st.sampled_from(REPLIES), max_size=4),
    num_held=st.integers(0, 200),
    cuts=st.lists(st.integers(0, 2000), max_size=6),
)
def test_values_come_to_their_places_and_what_follows_is_left(
    receive_values: Receive,
    sizes: list[int],
    num_good: int,
    behind: list[bytes],
    num_held: int,
    cuts: list[int],
) -> None:
    places = Places(num_good + (1 if behind else 0), sizes)
    values = [value_of(number, places.num_bytes) for number in range(num_good)]
    after = b"".join(behind)
    sent = b"".join(map(reply_of, values)) + after
    held, left = sent[:num_held], sent[num_held:]
    ends = sorted({0, len(left), *(cut for cut in cuts if cut < len(left))})
    with sending(*(left[first:end] for first, end in pairwise(ends))) as line:
        due = max(0, len(behind) - 1)
        found = received(receive_values, line, places, held, due, time.monotonic() + SOON_S)
        num, rest, error = found
        assert (num, error) == (num_good, 0)
        assert [places.value(at) for at in range(num)] == values
        assert places.num_touched() == num_good * places.num_bytes
        assert after.startswith(rest)
        assert rest + rest_of(line, len(after) - len(rest)) == after


def test_value_of_another_length_is_left(receive_values: Receive) -> None:
    places = Places(1, [40])
    other = reply_of(value_of(1, 41))
    with sending(other) as line:
        until = time.monotonic() + SOON_S
        found = received(receive_values, line, places, b"", 0, until)
        assert found[::2] == (0, 0)
        assert found[1] + rest_of(line, len(other) - len(found[1])) == other
    assert places.num_touched() == 0


@pytest.mark.parametrize("last", [b"$-1\r\n", b"-\r\n"])
def test_nothing_is_asked_of_the_server_that_it_will_not_send(
    receive_values: Receive, last: bytes
) -> None:
    """It reads no more bytes than the pending replies have; otherwise it would block."""
    places = Places(2, [3])
    with sending(reply_of(b"abc") + reply_of(b"def") + last) as line:
        until = time.monotonic() + SOON_S
        found = received(receive_values, line, places, b"", 1, until)
        assert found[::2] == (2, 0)
        assert found[1] + rest_of(line, len(last) - len(found[1])) == last


def test_what_comes_too_late_is_not_waited_for(receive_values: Receive) -> None:
    places = Places(2, [5])
    first = reply_of(b"there")
    with sending(first, *(b"$", b"5", b"\r", b"\n", b"t", b"o", b"o"), pause_s=0.1) as line:
        line.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, np.array([0, 200_000], "l").tobytes()
        )
        until = time.monotonic() + 0.35
        num, _, error = received(receive_values, line, places, b"", 0, until)
    assert (num, error) == (1, errno.ETIMEDOUT)
    assert places.value(0) == b"there"


def test_nobody_waits_for_ever(receive_values: Receive) -> None:
    """The call ends although the socket itself has no time-out."""
    places = Places(1, [5])
    with sending(b"$5\r\nto") as line:
        line.settimeout(None)
        until = time.monotonic() + 0.2
        assert received(receive_values, line, places, b"", 0, until)[::2] == (0, errno.ETIMEDOUT)


def test_time_that_is_over_is_over(receive_values: Receive) -> None:
    with sending(reply_of(b"abc")) as line:
        places = Places(1, [3])
        found = received(receive_values, line, places, b"", 0, time.monotonic() - 1)
    assert found == (0, b"", errno.ETIMEDOUT)
    assert places.num_touched() == 0


@pytest.mark.parametrize("cut", [2, 6, 9])
def test_server_that_hangs_up(receive_values: Receive, cut: int) -> None:
    places = Places(2, [4])
    with sending(reply_of(b"gone") + reply_of(b"away")[:cut], is_open=False) as line:
        until = time.monotonic() + SOON_S
        found = received(receive_values, line, places, b"", 0, until)
    assert found[::2] == (1, errno.ECONNRESET)
    assert places.value(0) == b"gone"


def test_value_that_does_not_end_where_it_should(receive_values: Receive) -> None:
    places = Places(2, [2])
    with sending(b"$2\r\nokxx" + reply_of(b"no")) as line:
        until = time.monotonic() + SOON_S
        found = received(receive_values, line, places, b"", 0, until)
    assert found[::2] == (0, errno.EPROTO)


def test_more_pieces_than_the_system_takes_at_a_time(receive_values: Receive) -> None:
    places = Places(2, [3] * 1500)
    values = [value_of(number, places.num_bytes) for number in range(2)]
    with sending(*map(reply_of, values)) as line:
        until = time.monotonic() + SOON_S
        found = received(receive_values, line, places, b"", 0, until)
    assert found == (2, b"", 0)
    assert [places.value(at) for at in range(2)] == values


def test_large_values_come_a_step_at_a_time(receive_values: Receive) -> None:
    places = Places(2, [96, 300_001, 150_000])
    values = [value_of(number, 4096) * 110 for number in range(2)]
    values = [value[: places.num_bytes] for value in values]
    with sending(*map(reply_of, values)) as line:
        until = time.monotonic() + SOON_S
        assert received(receive_values, line, places, b"", 0, until) == (2, b"", 0)
    assert [places.value(at) for at in range(2)] == values


def test_no_socket_is_an_error_that_is_told(receive_values: Receive) -> None:
    until = time.monotonic() + SOON_S
    crcs, rest, error = receive_values(-1, b"$1\r\n", b"", *Places(1, [1]).arguments, 0, 0, until)
    assert (len(crcs), rest, error) == (0, b"", errno.EBADF)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"pieces": 2}, "whole number"),
        ({"pieces": 0}, "whole number"),
        ({"heads": 2}, "heads must be between 0 and pieces=1, not 2"),
        ({"heads": -1}, "heads must be between 0 and pieces=1, not -1"),
        ({"line": b""}, "line is empty"),
        ({"due": -1}, "due must not be negative: -1"),
        ({"until": float("nan")}, "until is not a number"),
        ({"sizes": np.zeros(2, np.uint64)}, "equal lengths, not 1 and 2"),
        ({"addresses": np.zeros(1, np.uint64)}, r"addresses\[0\]: 3 bytes at address 0"),
    ],
)
def test_bad_arguments_are_refused(
    receive_values: Receive, changed: dict[str, object], reason: str
) -> None:
    addresses, sizes, pieces = Places(1, [3]).arguments
    usual: dict[str, object] = {
        "fd": -1,
        "line": b"$3\r\n",
        "held": b"",
        "addresses": addresses,
        "sizes": sizes,
        "pieces": pieces,
        "heads": 0,
        "due": 0,
        "until": 0.0,
    }
    with pytest.raises(ValueError, match=reason):
        receive_values(**(usual | changed))
    with pytest.raises(TypeError):
        receive_values(**(usual | {"addresses": None}))
