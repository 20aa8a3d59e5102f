"""Records of the journal: 64 bytes each, little-endian, with a checksum each.

offset  0  u32  crc32c of the bytes 4..64
        4  u8   kind              5  u8   version of the record
        6  u16  number of the namespace
        8  u64  sequence number: the record with a slot's highest number decides
       16  u32  slot              20 u32  depth: position of the block in its prompt
       24  u32  unix time         28 u32  crc32c of the block
       32  32 bytes key
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from threading import Lock
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.hot import NATIVE, Keys, crc32c_rows
from kvtier.tiers.disk.arrays import Bools, Int64s, Uint64s

RECORD: Final = np.dtype(
    [
        ("crc", "<u4"),
        ("kind", "u1"),
        ("version", "u1"),
        ("namespace", "<u2"),
        ("seq", "<u8"),
        ("slot", "<u4"),
        ("depth", "<u4"),
        ("time", "<u4"),
        ("data_crc", "<u4"),
        ("key", "V32"),
    ]
)
RECORD_BYTES: Final = 64
RECORD_VERSION: Final = 1
KEY_BYTES: Final = 32
_CRC_BYTES: Final = 4

Records = npt.NDArray[np.void]
"""Structured array of ``RECORD``."""

assert RECORD.itemsize == RECORD_BYTES, "a record is 64 bytes"


class RecordKind(IntEnum):
    """Kind of a journal record. 0 is not a kind, because a hole in the file reads as zeros."""

    HEADER = 1
    """First record of a journal: ``seq`` is its generation, ``key`` begins with the slab's id."""
    PUT = 2
    """``slot`` holds the block ``key`` from now on."""
    DEL = 3
    """``slot`` holds nothing from now on."""
    NAMESPACE = 4
    """``namespace`` stands for the digest in ``key``."""
    BAD = 5
    """``slot`` can't be read or written. It is not used until a repair releases it."""


class SequenceNumbers:
    """Source of unique sequence numbers from ``next`` on. Thread-safe.

    The slabs of a set share one source, so that all parts of a block can have the same number.
    """

    def __init__(self, first: int) -> None:
        self.next = first
        self._lock = Lock()

    def take(self, num: int) -> Uint64s:
        """Return the next sequence numbers, ascending: uint64 [num]."""
        with self._lock:
            first, self.next = self.next, self.next + num
        return np.arange(first, first + num, dtype=np.uint64)


def blank(num_records: int, kind: RecordKind) -> Records:
    """Return records of one kind, with all other fields 0."""
    records = np.zeros(num_records, RECORD)
    records["kind"] = kind
    records["version"] = RECORD_VERSION
    return records


def header(slab_id: bytes, generation: int) -> Records:
    """Return the first record of a journal, not yet sealed."""
    record = blank(1, RecordKind.HEADER)
    record["seq"] = generation
    record["key"] = np.frombuffer(slab_id.ljust(32, b"\0"), "V32")
    return record


def seal(records: Records) -> None:
    """Compute the checksums, in place."""
    records["crc"] = crc32c_rows(_body(records))


def are_valid(records: Records) -> Bools:
    """Return which records have a right checksum, and a known version and kind: bool [n]."""
    right = records["crc"] == crc32c_rows(_body(records))
    kind = records["kind"]
    return np.asarray(right & (records["version"] == RECORD_VERSION) & (kind >= 1) & (kind <= 5))


def are_live(kinds: npt.NDArray[np.uint8]) -> Bools:
    """Return which kinds of deciding records a compaction has to keep: bool [n]."""
    return np.asarray((kinds == RecordKind.PUT) | (kinds == RecordKind.BAD))


def _body(records: Records) -> npt.NDArray[np.uint8]:
    return records.view(np.uint8).reshape(len(records), RECORD_BYTES)[:, _CRC_BYTES:]


def as_keys(keys: Sequence[bytes]) -> Records:
    """Return keys of 32 bytes each as V32 [n]; a view if they are contiguous already."""
    if NATIVE and isinstance(keys, Keys):
        return np.frombuffer(memoryview(keys), "V32")
    joined = b"".join(keys)
    assert len(joined) == KEY_BYTES * len(keys), "a key is 32 bytes"
    return np.frombuffer(joined, "V32")


def pick(records: Records, at: Int64s) -> Records:
    """Return ``records[at]``, but faster than NumPy's indexing of structured arrays."""
    return np.take(records.view(f"V{RECORD_BYTES}"), at).view(RECORD)


def same_keys(left: Records, right: Records) -> Bools:
    """Return which keys are equal in all 32 bytes: bool [n]."""
    return np.asarray((as_words(left) == as_words(right)).all(axis=1))


def as_words(keys: Records) -> Uint64s:
    """Return the bytes of keys as words, to compare and to sort: uint64 [n, 4]."""
    return np.ascontiguousarray(keys).view("<u8").reshape(len(keys), KEY_BYTES // 8)
