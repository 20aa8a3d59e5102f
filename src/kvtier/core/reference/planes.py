"""Byte planes of floating-point numbers, in the format of ``native/planes/planes.hpp``."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kvtier.core.reference.arguments import check_memory

Uint8s = npt.NDArray[np.uint8]

TILE_ELEMENTS = 4096
WHOLE = -1
MAX_BASE = 241
ESCAPE = 15
SAMPLE_RUNS = 16
RUN_BYTES = 128
PAIRED_SHARE = 0.97
LEAST_GAIN = 0.98
WORDS: dict[int, np.dtype[np.unsignedinteger]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
}


def choose_planes(address: int, num_bytes: int) -> tuple[int, int]:
    """Return width and base with which the fewest bits of these bytes remain, by a sample.

    Width 0 if too few are saved. The caller guarantees that the memory exists.
    """
    check_memory("address: ", address, num_bytes)
    content = _bytes(address, num_bytes)
    step = num_bytes // SAMPLE_RUNS // 8 * 8
    if step >= RUN_BYTES:
        runs = [content[at * step : at * step + RUN_BYTES] for at in range(SAMPLE_RUNS)]
        sample = np.concatenate(runs)
    else:
        sample = content[: num_bytes // 4 * 4]
    if not len(sample):
        return 0, 0
    counts = {width: _count(sample, width) for width in (1, 2, 4)}
    one = (4 + _bits(counts[1])) / 8
    two = (8 + _bits(counts[2])) / 16
    four = (24 + _bits(counts[4])) / 32
    if min(one, two, four) > LEAST_GAIN:
        return 0, 0
    if one <= two and one <= four:
        return 1, 0
    return (2, _window(counts[2])) if two <= four else (4, _window(counts[4]))


def split_planes(
    address: int,
    num_bytes: int,
    width: int,
    base: int,
    high: int,
    low: int,
    escapes: int,
    max_escapes: int,
) -> int:
    """Split the elements at ``address`` into planes at ``high``, ``low`` and ``escapes``.

    Returns the number of escapes, or -1 if there are more than ``max_escapes``; the planes are
    incomplete then. The caller guarantees that the memory exists.

    num_bytes: a multiple of 2 * width.
    width: bytes of an element: 1, 2 or 4.
    base: first exponent of the window; -1 to write whole bytes; 0 for width 1.
    """
    num_high, num_low = _check(num_bytes, width, base)
    _check_memory(address, num_bytes, high, num_high, low, num_low, escapes, max_escapes)
    words = _rotated(_bytes(address, num_bytes), width)
    highs, lows, outside = _bytes(high, num_high), _bytes(low, num_low), []
    for first in range(0, len(words), TILE_ELEMENTS):
        tile = words[first : first + TILE_ELEMENTS]
        half = len(tile) // 2
        if width == 1:
            place = slice(first // 2, first // 2 + half)
            highs[place] = (tile[:half] >> 4) | (tile[half:] & 0xF0)
            lows[place] = (tile[:half] & 0x0F) | (tile[half:] << 4)
            continue
        planes = tile.view(np.uint8).reshape(-1, width)
        lows[first * (width - 1) :][: len(tile) * (width - 1)] = planes[:, :-1].T.ravel()
        exponents = planes[:, -1]
        if base == WHOLE:
            highs[first : first + len(tile)] = exponents
            continue
        numbers = np.minimum(exponents - np.uint8(base), ESCAPE)
        outside.append(exponents[numbers == ESCAPE])
        highs[first // 2 : first // 2 + half] = numbers[:half] | (numbers[half:] << 4)
    found = np.concatenate([*outside, np.empty(0, np.uint8)])
    if len(found) > max_escapes:
        return -1
    _bytes(escapes, len(found))[:] = found
    return len(found)


def join_planes(
    address: int,
    num_bytes: int,
    width: int,
    base: int,
    high: int,
    low: int,
    escapes: int,
    num_escapes: int,
) -> bool:
    """Put the elements that ``split_planes`` has split together again, at ``address``.

    Returns whether there were exactly ``num_escapes`` escapes. The memory at ``address`` is
    undefined if not.
    """
    num_high, num_low = _check(num_bytes, width, base)
    _check_memory(address, num_bytes, high, num_high, low, num_low, escapes, num_escapes)
    words = np.empty(num_bytes // width, WORDS[width])
    highs, lows, outside = (
        _bytes(high, num_high),
        _bytes(low, num_low),
        _bytes(escapes, num_escapes),
    )
    used = 0
    for first in range(0, len(words), TILE_ELEMENTS):
        tile = words[first : first + TILE_ELEMENTS]
        half = len(tile) // 2
        pairs = highs[first // 2 : first // 2 + half]
        if width == 1:
            rest = lows[first // 2 : first // 2 + half]
            tile[:half] = (pairs << 4) | (rest & 0x0F)
            tile[half:] = (pairs & 0xF0) | (rest >> 4)
            continue
        planes = tile.view(np.uint8).reshape(-1, width)
        rest = lows[first * (width - 1) :][: len(tile) * (width - 1)]
        planes[:, :-1] = rest.reshape(width - 1, -1).T
        if base == WHOLE:
            planes[:, -1] = highs[first : first + len(tile)]
            continue
        numbers = np.concatenate((pairs & 0x0F, pairs >> 4))
        are_outside = numbers == ESCAPE
        num = int(are_outside.sum())
        if used + num > num_escapes:
            return False
        exponents = numbers + np.uint8(base)
        exponents[are_outside] = outside[used : used + num]
        planes[:, -1] = exponents
        used += num
    bits = np.array(8 * width - 1, words.dtype)
    one = np.array(1, words.dtype)
    _bytes(address, num_bytes)[:] = ((words >> one) | (words << bits)).view(np.uint8)
    return used == num_escapes


def _rotated(content: Uint8s, width: int) -> npt.NDArray[np.unsignedinteger]:
    """Return the elements, each rotated left by one bit, in memory of their own."""
    words = content.view(WORDS[width]) if width > 1 else content
    one, bits = np.array(1, words.dtype), np.array(8 * width - 1, words.dtype)
    return np.asarray((words << one) | (words >> bits))


def _count(sample: Uint8s, width: int) -> npt.NDArray[np.int64]:
    """Return how often each exponent byte occurs; of one-byte elements their upper four bits."""
    rotated = _rotated(sample, width)
    return np.bincount(rotated >> (4 if width == 1 else 8 * width - 8), minlength=256)


def _bits(counts: npt.NDArray[np.int64]) -> float:
    some = counts[counts > 0]
    num = some.sum()
    return float((some * np.log2(num / some)).sum() / num)


def _window(counts: npt.NDArray[np.int64]) -> int:
    """Return the base of the window that has the most exponents; -1 if it lacks too many."""
    inside = np.convolve(counts, np.ones(ESCAPE, np.int64), "valid")
    best = int(inside.argmax())
    return best if inside[best] >= PAIRED_SHARE * counts.sum() else WHOLE


def _check(num_bytes: int, width: int, base: int) -> tuple[int, int]:
    """Return the bytes of both planes; raise ValueError for arguments that are out of range."""
    if width not in WORDS:
        raise ValueError(f"width must be 1, 2 or 4, not {width}")
    if num_bytes % (2 * width):
        raise ValueError(f"{num_bytes} bytes are no even number of elements of {width}")
    if base != 0 if width == 1 else not WHOLE <= base <= MAX_BASE:
        raise ValueError(f"base {base} is out of range for width {width}")
    num = num_bytes // width
    low = num_bytes // 2 if width == 1 else num * (width - 1)
    return num if base == WHOLE else num // 2, low


def _check_memory(
    address: int,
    num_bytes: int,
    high: int,
    num_high: int,
    low: int,
    num_low: int,
    escapes: int,
    num_escapes: int,
) -> None:
    check_memory("address: ", address, num_bytes)
    check_memory("high: ", high, num_high)
    check_memory("low: ", low, num_low)
    check_memory("escapes: ", escapes, num_escapes)


def _bytes(address: int, num_bytes: int) -> Uint8s:
    """Return the memory at ``address`` as an array."""
    if not num_bytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
