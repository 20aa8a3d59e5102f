"""Digests of sets of keys, by bucket: keys that two ranks have in common are not sent twice.

A key belongs to bucket number ``first 16 bits mod number of buckets``. The digest of a bucket is
the sum of two 64-bit hashes of each of its keys, so the order of the keys does not matter. If sets
with equal digests differ (a chance of one in 2^64, or keys chosen for it), the cost is a read that
finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.types import BlockKey

KEY_BYTES: Final = 32
MAX_BUCKETS: Final = 1 << 16
DIGEST_BYTES: Final = 16
KEYS_PER_BUCKET: Final = 150
"""Minimum average: digests of eight ranks then take less than a byte per key."""
_MIXER: Final = np.uint64(0xD6E8_FEB8_6659_FD93)

Keys = npt.NDArray[np.void]
Uint64s = npt.NDArray[np.uint64]


def as_keys(content: bytes) -> Keys:
    """Return V32 [n]: the keys of 32 bytes each that ``content`` concatenates."""
    return np.frombuffer(content, f"V{KEY_BYTES}")


def keys_in(content: bytes) -> list[BlockKey]:
    """Return the concatenated keys as a list."""
    return [BlockKey(content[at : at + KEY_BYTES]) for at in range(0, len(content), KEY_BYTES)]


def num_buckets_for(num_keys: int) -> int:
    """Return the number of buckets, a power of two."""
    wanted = max(1, num_keys // KEYS_PER_BUCKET)
    return min(MAX_BUCKETS, 1 << (wanted.bit_length() - 1))


def buckets_of(keys: Keys, num_buckets: int) -> npt.NDArray[np.int64]:
    """Return int64 [n]: the bucket of each key."""
    first = np.ascontiguousarray(keys).view("<u2").reshape(len(keys), KEY_BYTES // 2)[:, 0]
    return first.astype(np.int64) & (num_buckets - 1)


def digests_of(pieces: Iterable[Keys]) -> Uint64s:
    """Return uint64 [MAX_BUCKETS, 2]: the digests of all keys in the pieces."""
    sums = np.zeros((2, MAX_BUCKETS), np.uint64)
    for keys in pieces:
        words = np.ascontiguousarray(keys).view("<u8").reshape(len(keys), KEY_BYTES // 8)
        value = np.full(len(keys), _MIXER)
        for column in range(words.shape[1]):
            value = _mix(value ^ words[:, column])
        buckets = buckets_of(keys, MAX_BUCKETS)
        np.add.at(sums[0], buckets, value)
        np.add.at(sums[1], buckets, _mix(~value))
    return np.ascontiguousarray(sums.T)


def _mix(value: Uint64s) -> Uint64s:
    value = value ^ (value >> np.uint64(32))
    value *= _MIXER
    value ^= value >> np.uint64(29)
    return value


def fold(digests: Uint64s, num_buckets: int) -> bytes:
    """Return the digests for fewer buckets, serialised."""
    folded: Uint64s = digests.reshape(-1, num_buckets, 2).sum(axis=0, dtype=np.uint64)
    return folded.tobytes()


def differing(one: bytes, another: bytes) -> npt.NDArray[np.bool_]:
    """Return bool [num_buckets]: where two digests differ."""
    ours, theirs = (np.frombuffer(each, "<u8").reshape(-1, 2) for each in (one, another))
    return np.asarray((ours != theirs).any(axis=1))
