"""crc32c in NumPy, many bytes at a time.

The state is the inverted checksum. It is linear in the bits, so a long piece is cut into rows of
the same width. All rows are processed in parallel, and their states are then joined in pairs:

    state(a b) = shift(state(a), len(b)) ^ state(b)      with state(b) begun at 0
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from kvtier.core.reference.arguments import check_memory, check_threads, pieces_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78
_ALL_BITS = 0xFFFF_FFFF
_ROW_BYTES = 512  # bytes of a row of a long piece
_NUM_SIDE_BY_SIDE = 1 << 14  # rows at a time; their states stay in the CPU's caches


def crc32c(address: int, num_bytes: int, seed: int = 0) -> int:
    """Return the crc32c (Castagnoli) of ``num_bytes`` bytes at ``address``.

    The caller guarantees that the memory exists. seed: checksum of the preceding bytes; 0 for none.
    """
    if num_bytes < 0 or not 0 <= seed <= _ALL_BITS or address < 0:
        raise TypeError(
            f"address, num_bytes and seed must not be negative and a seed has 32 bits, "
            f"not {address}, {num_bytes} and {seed}"
        )
    check_memory("", address, num_bytes)
    return _update(seed ^ _ALL_BITS, address, num_bytes) ^ _ALL_BITS


def crc32c_many(
    addresses: NDArray[np.uint64], sizes: NDArray[np.uint64], threads: int = 1
) -> NDArray[np.uint32]:
    """Return the crc32c of ``sizes[i]`` bytes at ``addresses[i]``, for every i: uint32 [n].

    addresses, sizes: uint64 [n], C-contiguous. threads: 1 to 256; ignored here.
    """
    pieces = pieces_of(addresses, sizes)
    check_threads(threads)
    return np.array([crc32c(*piece) for piece in pieces], np.uint32)


def crc32c_rows(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the crc32c of each row of uint8 [n, width]: uint32 [n].

    Each row is contiguous; there may be gaps between rows, as in ``records[:, 4:64]``.
    """
    try:
        view = memoryview(rows)  # type: ignore[arg-type]  # checked here
    except TypeError:
        raise TypeError(f"rows must be an array of uint8, not {type(rows).__qualname__}") from None
    if view.format != "B":
        raise TypeError(f"rows must be an array of uint8; its items have format {view.format!r}")
    if view.ndim != 2:
        raise ValueError(f"rows must have two dimensions, not {view.ndim}")
    num, width = rows.shape
    if width > 1 and rows.strides[1] != 1:
        raise ValueError(
            f"rows must lie in one piece each, not with {rows.strides[1]} bytes from item to item"
        )
    checksums = np.empty(num, np.uint32)
    for start in range(0, num, _NUM_SIDE_BY_SIDE):
        part = rows[start : start + _NUM_SIDE_BY_SIDE]
        states = np.full(len(part), _ALL_BITS, np.uint32)
        checksums[start : start + len(part)] = ~_update_rows(states, part)
    return checksums


def _update(state: int, address: int, num_bytes: int) -> int:
    num_rows, rest = divmod(num_bytes, _ROW_BYTES)
    for start in range(0, num_rows, _NUM_SIDE_BY_SIDE):
        num = min(_NUM_SIDE_BY_SIDE, num_rows - start)
        place = (ctypes.c_uint8 * (num * _ROW_BYTES)).from_address(address + start * _ROW_BYTES)
        rows = np.frombuffer(memoryview(place), np.uint8).reshape(num, _ROW_BYTES)
        states = np.zeros(num, np.uint32)
        states[0] = state
        state = _joined(_update_rows(states, rows))
    table = _byte_table()
    for byte in ctypes.string_at(address + num_rows * _ROW_BYTES, rest) if rest else b"":
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state


def _update_rows(states: NDArray[np.uint32], rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the states after their rows, processing four bytes of each row at a time."""
    num_words = rows.shape[1] // 4
    low, high = _half_tables()
    words = np.ascontiguousarray(rows[:, : 4 * num_words]).view("<u4")
    for column in np.ascontiguousarray(words.T):
        states = states ^ column
        states = low[states & 0xFFFF] ^ high[states >> 16]
    steps = np.array(_byte_table(), np.uint32)
    for column in rows[:, 4 * num_words :].T:
        states = steps[(states ^ column) & 0xFF] ^ (states >> 8)
    return states


def _joined(states: NDArray[np.uint32]) -> int:
    """Return the state of all rows in order, from the state of each row."""
    num_bytes = _ROW_BYTES
    while len(states) > 1:
        # Pad an odd number in front: a zero state there has no effect.
        if len(states) % 2:
            states = np.concatenate((np.zeros(1, np.uint32), states))
        low, high = _shift_tables(num_bytes)
        left = states[::2]
        states = low[left & 0xFFFF] ^ high[left >> 16] ^ states[1::2]
        num_bytes *= 2
    return int(states[0])


@cache
def _byte_table() -> list[int]:
    """Return the effect of each byte on a state of 0."""
    table = list(range(256))
    for _ in range(8):
        table = [(state >> 1) ^ (_POLYNOMIAL if state & 1 else 0) for state in table]
    return table


@cache
def _half_tables() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return tables of the states after four zero bytes, by low and high half of a state.

    Both are uint32 [65536].
    """
    return _spread(_shift_bits(4))


@cache
def _shift_tables(num_bytes: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return such tables for ``num_bytes`` zero bytes: a power of two, at least 4."""
    return _spread(_shift_bits(num_bytes))


@cache
def _shift_bits(num_bytes: int) -> tuple[int, ...]:
    """Return the state that each single bit, 1 << i, becomes after ``num_bytes`` zero bytes."""
    if num_bytes == 1:
        table = _byte_table()
        return tuple(table[(1 << i) & 0xFF] ^ ((1 << i) >> 8) for i in range(32))
    half = _shift_bits(num_bytes // 2)
    return tuple(_times(half, state) for state in half)


def _times(bits: tuple[int, ...], state: int) -> int:
    result = 0
    for i in range(32):
        if state >> i & 1:
            result ^= bits[i]
    return result


def _spread(bits: tuple[int, ...]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Expand the effects of 32 single bits to two tables of 65,536 entries, by XOR."""
    halves = []
    for start in (0, 16):
        table = np.zeros(1, np.uint32)
        for bit in bits[start : start + 16]:
            table = np.concatenate((table, table ^ np.uint32(bit)))
        halves.append(table)
    return halves[0], halves[1]
