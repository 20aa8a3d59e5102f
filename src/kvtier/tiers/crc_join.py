"""Checksums of blocks from the checksums of their pieces, without reading the bytes again.

A CRC is linear: crc(A followed by B) = crc(B) xor M(crc(A)), where M is the effect of as many zero
bytes as B has. M is a matrix over single bits, computed once for each length.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvtier.core.hot import copy_checked, crc32c, crc32c_many
from kvtier.tiers.pieces import Pieces

Uint32s = npt.NDArray[np.uint32]

POLYNOMIAL = 0x82F63B78
"""CRC-32C, bits reversed."""
BITS = 32
JOINED_AT_ONCE = 1 << 12
"""Number of piece checksums to join at once: the intermediate arrays stay in the CPU's caches."""


def joined_crcs(crcs: Uint32s, sizes: npt.NDArray[np.int64]) -> Uint32s:
    """Return the checksums of blocks: uint32 [num_blocks].

    crcs: uint32 [num_blocks, num_pieces], crc32c of each piece. sizes: int64 [num_pieces], bytes.
    """
    if len(sizes) == 1:
        return crcs[:, 0].copy()
    matrices = _shifts(tuple(sizes.tolist()))
    found = np.zeros(len(crcs), np.uint32)
    step = max(1, JOINED_AT_ONCE // len(sizes))
    for at in range(0, len(crcs), step):
        part = crcs[at : at + step, :, None]
        # All ones where the bit is set: selects the bit's column of the matrix, or zero.
        taken = np.negative(part >> np.arange(BITS, dtype=np.uint32) & np.uint32(1)) & matrices
        found[at : at + step] = np.bitwise_xor.reduce(taken, axis=(1, 2))
    return found


@lru_cache(maxsize=16)
def _shifts(sizes: tuple[int, ...]) -> Uint32s:
    """Return uint32 [num_pieces, 32]: the effect of the later pieces on each bit of a checksum."""
    behind = np.uint32(1) << np.arange(BITS, dtype=np.uint32)
    made = [behind]
    for size in sizes[:0:-1]:
        behind = _times(behind, _zeros(size))
        made.append(behind)
    return np.array(made[::-1], np.uint32)


def _times(matrix: Uint32s, vectors: Uint32s) -> Uint32s:
    """Multiply a matrix by each of several bit vectors. matrix: uint32 [32], its columns."""
    result = np.zeros_like(vectors)
    for bit in range(BITS):
        result ^= np.where(vectors >> np.uint32(bit) & np.uint32(1), matrix[bit], np.uint32(0))
    return result


@lru_cache(maxsize=64)
def _zeros(num_bytes: int) -> Uint32s:
    """Return the matrix, uint32 [32], that ``num_bytes`` zero bytes apply to a checksum."""
    power = np.array([POLYNOMIAL, *(1 << bit for bit in range(BITS - 1))], np.uint32)  # 1 zero bit
    result, left = np.uint32(1) << np.arange(BITS, dtype=np.uint32), 8 * num_bytes
    while left:
        if left & 1:
            result = _times(power, result)
        power, left = _times(power, power), left >> 1
    return result


def checksum(content: bytes | npt.NDArray[np.uint8]) -> int:
    """Return the crc32c of bytes, which are C-contiguous."""
    view = np.frombuffer(content, np.uint8)
    return crc32c(view.ctypes.data, len(view))


def block_crcs(blocks: Pieces, num_threads: int = 1) -> Uint32s:
    """Return the crc32c of each block: uint32 [num_blocks]. Host memory only."""
    sizes = np.tile(blocks.sizes.astype(np.uint64), len(blocks))
    of_pieces = crc32c_many(blocks.addresses.ravel(), sizes, num_threads)
    return joined_crcs(of_pieces.reshape(blocks.addresses.shape), blocks.sizes)


def copied_crcs(to: Pieces, at: Pieces) -> Uint32s:
    """Copy blocks from ``at`` to ``to``, and return the crc32c of each copy: uint32 [num_blocks].

    Both have pieces of the same sizes. Host memory only.

    Each byte is read once, so the checksum always matches the copy, even if another thread writes
    to ``at`` meanwhile.
    """
    sizes = np.tile(to.sizes.astype(np.uint64), len(to))
    return copy_checked(to.addresses.ravel(), at.addresses.ravel(), sizes, len(to.sizes))
