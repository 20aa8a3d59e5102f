"""The checksum of bytes from those of the pieces that they lie in, without reading them again.

A CRC is linear: that of A followed by B is that of B, xor what B's length in zeros makes of that of
A. The latter is a matrix over single bits, made once for each length.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvtier._hot import crc32c_many
from kvtier.tiers.pieces import Pieces

Uint32s = npt.NDArray[np.uint32]

POLYNOMIAL = 0x82F63B78
"""CRC-32C, bits reversed."""
BITS = 32


def joined_crcs(crcs: Uint32s, sizes: npt.NDArray[np.int64]) -> Uint32s:
    """Checksums of blocks: uint32 [num_blocks].

    crcs: uint32 [num_blocks, num_pieces], crc32c of each piece. sizes: int64 [num_pieces], bytes.
    """
    found = crcs[:, 0].copy()
    for at, size in enumerate(sizes[1:].tolist(), 1):
        found = _times(_zeros(size), found) ^ crcs[:, at]
    return found


def _times(matrix: Uint32s, vectors: Uint32s) -> Uint32s:
    """A matrix by each of some vectors of bits. matrix: uint32 [32], what each bit becomes."""
    result = np.zeros_like(vectors)
    for bit in range(BITS):
        result ^= np.where(vectors >> np.uint32(bit) & np.uint32(1), matrix[bit], np.uint32(0))
    return result


@lru_cache(maxsize=64)
def _zeros(num_bytes: int) -> Uint32s:
    """What so many zero bytes make of a checksum."""
    power = np.array([POLYNOMIAL, *(1 << bit for bit in range(BITS - 1))], np.uint32)  # of a bit
    result, left = np.uint32(1) << np.arange(BITS, dtype=np.uint32), 8 * num_bytes
    while left:
        if left & 1:
            result = _times(power, result)
        power, left = _times(power, power), left >> 1
    return result


def block_crcs(blocks: Pieces, num_threads: int = 1) -> Uint32s:
    """crc32c of each block: uint32 [num_blocks]. Host memory only."""
    sizes = np.tile(blocks.sizes.astype(np.uint64), len(blocks))
    of_pieces = crc32c_many(blocks.addresses.ravel(), sizes, num_threads)
    return joined_crcs(of_pieces.reshape(blocks.addresses.shape), blocks.sizes)
