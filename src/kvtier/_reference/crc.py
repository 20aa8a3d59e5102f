"""crc32c by table."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78


@cache
def _table() -> NDArray[np.uint32]:
    """uint32 [256]: what one byte does to the checksum."""
    words = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        words = np.where(words & 1, (words >> 1) ^ np.uint32(_POLYNOMIAL), words >> 1)
    return words.astype(np.uint32)


@cache
def _list() -> list[int]:
    return [int(word) for word in _table()]


def crc32c(address: int, num_bytes: int, seed: int = 0) -> int:
    """Checksum of ``num_bytes`` at ``address``; seed: that of the bytes before them."""
    table = _list()
    state = seed ^ 0xFFFF_FFFF
    for byte in ctypes.string_at(address, num_bytes):
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ 0xFFFF_FFFF


def crc32c_many(
    addresses: NDArray[np.uint64], sizes: NDArray[np.int64], threads: int = 1
) -> NDArray[np.uint32]:
    """uint32 [n]: checksum of ``sizes[i]`` bytes at ``addresses[i]``."""
    pairs = zip(addresses.tolist(), sizes.tolist(), strict=True)
    return np.array([crc32c(address, size) for address, size in pairs], np.uint32)


def crc32c_rows(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """uint32 [n]: checksum of each row of uint8 [n, width]."""
    table = _table()
    states = np.full(len(rows), 0xFFFF_FFFF, np.uint32)
    step = 8192
    for start in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[start : start + step].T)
        state = states[start : start + step]
        for column in part:
            state = table[(state ^ column) & 0xFF] ^ (state >> np.uint32(8))
        states[start : start + step] = state
    return states ^ np.uint32(0xFFFF_FFFF)
