"""Records of the journal: 64 bytes each, little-endian, every one with its own checksum.

offset  0  u32  crc32c of the bytes 4..64
        4  u8   kind              5  u8   version of the record
        6  u16  number of the namespace
        8  u64  sequence number: the highest one of a slot decides
       16  u32  slot              20 u32  depth: position of the block in its prompt
       24  u32  unix time         28 u32  crc32c of the block
       32  32 bytes key
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier._hot import NATIVE, Keys, crc32c_rows

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
    """Kind of a journal record. 0 is none: a hole in the file is no record."""

    HEADER = 1
    """First of a journal: ``seq`` is its generation, ``key`` begins with the slab's id."""
    PUT = 2
    """``slot`` holds the block ``key`` from now on."""
    DEL = 3
    """``slot`` holds nothing from now on."""
    NAMESPACE = 4
    """``namespace`` stands for the digest in ``key``."""
    BAD = 5
    """``slot`` can't be read or written: not used until a repair says otherwise."""


def blank(num_records: int, kind: RecordKind) -> Records:
    """Records of one kind, everything else 0."""
    records = np.zeros(num_records, RECORD)
    records["kind"] = kind
    records["version"] = RECORD_VERSION
    return records


def header(slab_id: bytes, generation: int) -> Records:
    """The first record of a journal, not yet sealed."""
    record = blank(1, RecordKind.HEADER)
    record["seq"] = generation
    record["key"] = np.frombuffer(slab_id.ljust(32, b"\0"), "V32")
    return record


def seal(records: Records) -> None:
    """Compute the checksums, in place."""
    records["crc"] = crc32c_rows(_body(records))


def are_valid(records: Records) -> npt.NDArray[np.bool_]:
    """Bool [n]: the checksum fits, and this version knows the record."""
    right = records["crc"] == crc32c_rows(_body(records))
    kind = records["kind"]
    return np.asarray(right & (records["version"] == RECORD_VERSION) & (kind >= 1) & (kind <= 5))


def are_live(kinds: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Bool [n]: what a new journal has to say again, of the records that decide."""
    return np.asarray((kinds == RecordKind.PUT) | (kinds == RecordKind.BAD))


def _body(records: Records) -> npt.NDArray[np.uint8]:
    return records.view(np.uint8).reshape(len(records), RECORD_BYTES)[:, _CRC_BYTES:]


def as_keys(keys: Sequence[bytes]) -> Records:
    """V32 [n] of keys of 32 bytes each; a view where they lie side by side."""
    if NATIVE and isinstance(keys, Keys):
        return np.frombuffer(memoryview(keys), "V32")
    joined = b"".join(keys)
    assert len(joined) == KEY_BYTES * len(keys), "a key is 32 bytes"
    return np.frombuffer(joined, "V32")


def pick(records: Records, at: npt.NDArray[np.int64]) -> Records:
    """``records[at]``, a good deal faster."""
    return np.take(records.view(f"V{RECORD_BYTES}"), at).view(RECORD)


def key_prefixes(records: Records) -> npt.NDArray[np.uint64]:
    """uint64 [n]: the first 8 bytes of each key."""
    words = records.view("<u8").reshape(len(records), RECORD_BYTES // 8)
    return np.ascontiguousarray(words[:, (RECORD_BYTES - KEY_BYTES) // 8])


def same_keys(left: Records, right: Records) -> npt.NDArray[np.bool_]:
    """Bool [n]: which keys are equal, all 32 bytes of them."""
    return np.asarray((as_words(left) == as_words(right)).all(axis=1))


def as_words(keys: Records) -> npt.NDArray[np.uint64]:
    """uint64 [n, 4]: the bytes of keys, to compare and to sort."""
    return np.ascontiguousarray(keys).view("<u8").reshape(len(keys), KEY_BYTES // 8)
