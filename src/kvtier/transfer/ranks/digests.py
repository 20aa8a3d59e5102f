"""Sets of keys, compared by buckets: what two ranks have in common is not sent twice.

A key belongs to bucket number ``first 16 bits mod number of buckets``. The digest of a bucket is
the sum of two hashes of each of its keys, 64 bits each: the same in whatever order they are added.
Equal digests of sets that are not equal, one in 2^64, or made by somebody who can choose keys, cost
a read that finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.types import BlockKey

KEY_BYTES: Final = 32
MAX_BUCKETS: Final = 1 << 16
DIGEST_BYTES: Final = 16
KEYS_PER_BUCKET: Final = 150
"""At least, on average: then digests of eight ranks are less than a byte per key."""
_MIXER: Final = np.uint64(0xD6E8_FEB8_6659_FD93)

Keys = npt.NDArray[np.void]
Uint64s = npt.NDArray[np.uint64]


def as_keys(content: bytes) -> Keys:
    """V32 [n] of keys of 32 bytes each, one behind the other."""
    return np.frombuffer(content, f"V{KEY_BYTES}")


def keys_in(content: bytes) -> list[BlockKey]:
    """The same keys, each by itself."""
    return [BlockKey(content[at : at + KEY_BYTES]) for at in range(0, len(content), KEY_BYTES)]


def num_buckets_for(num_keys: int) -> int:
    """A power of two."""
    wanted = max(1, num_keys // KEYS_PER_BUCKET)
    return min(MAX_BUCKETS, 1 << (wanted.bit_length() - 1))


def buckets_of(keys: Keys, num_buckets: int) -> npt.NDArray[np.int64]:
    """int64 [n]: of each key."""
    first = np.ascontiguousarray(keys).view("<u2").reshape(len(keys), KEY_BYTES // 2)[:, 0]
    return first.astype(np.int64) & (num_buckets - 1)


def digests_of(pieces: Iterable[Keys]) -> Uint64s:
    """uint64 [MAX_BUCKETS, 2], of all keys in the pieces."""
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
    """The digests for fewer buckets, as they are sent."""
    folded: Uint64s = digests.reshape(-1, num_buckets, 2).sum(axis=0, dtype=np.uint64)
    return folded.tobytes()


def differing(one: bytes, another: bytes) -> npt.NDArray[np.bool_]:
    """Bool [num_buckets]: where two digests are not equal."""
    ours, theirs = (np.frombuffer(each, "<u8").reshape(-1, 2) for each in (one, another))
    return np.asarray((ours != theirs).any(axis=1))
