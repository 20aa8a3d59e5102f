"""The file ``trust``: which blocks need no verification after a clean close.

Its format, little-endian:

      0  8 bytes "kvttrst2"          8  u32 crc32c of the bytes from 12 on
     12  16 bytes id of the slab    28  u64 session that closed it    36  u64 number of slots
     44  u32 crc32c of one u32 per slot: the checksum of its deciding record if the slot's bit is
         set and it has a block; else 0
     48  a bit per slot, the lowest one first: its block was written or verified by an owner
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.core.system.private_files import open_file
from kvtier.tiers.disk.arrays import Bools
from kvtier.tiers.disk.format.folder import TRUST
from kvtier.tiers.disk.format.records import RecordKind, Records
from kvtier.tiers.disk.format.rows import SlotRows
from kvtier.tiers.disk.format.superblock import DataMark, Superblock, checksum_of
from kvtier.tiers.disk.system import DiskSystem, read_at

MAGIC: Final = b"kvttrst2"
_HEAD: Final = struct.Struct("<8sI")
_WHOSE: Final = struct.Struct("<16sQQ")
_RECORDS: Final = struct.Struct("<I")

Columns = Records | SlotRows
"""``kind`` and ``crc`` of each slot's deciding record. There may be more slots than needed."""


def num_bytes_of(num_slots: int) -> int:
    """Return the size of the file for ``num_slots`` slots, in bytes."""
    return _HEAD.size + _WHOSE.size + _RECORDS.size + -(-num_slots // 8)


def encode(trusted: Bools, table: Columns, superblock: Superblock) -> bytes:
    """Return the file's content.

    Args:
        trusted: bool [num_slots], slots that need no verification.
        table: deciding record of each slot. Their checksum ties the file to this journal: any
            other version of the journal differs in some slot.
        superblock: superblock of the slab.
    """
    whose = _WHOSE.pack(superblock.slab_id, superblock.member.session, len(trusted))
    records = _RECORDS.pack(_of_records(trusted, table))
    body = whose + records + np.packbits(trusted, bitorder="little").tobytes()
    return _HEAD.pack(MAGIC, checksum_of(body)) + body


def decode(content: bytes, table: Callable[[], Columns], superblock: Superblock) -> Bools | None:
    """Return which slots are trusted: bool [num_slots].

    None if the content is damaged, or the file or the journal does not belong to the last close
    according to ``superblock``.

    table: returns the deciding record of each slot; called last.
    """
    num_slots = superblock.num_slots
    if len(content) < num_bytes_of(num_slots):
        return None
    content = content[: num_bytes_of(num_slots)]
    magic, checksum = _HEAD.unpack_from(content)
    body = content[_HEAD.size :]
    whose = _WHOSE.pack(superblock.slab_id, superblock.member.session, num_slots)
    if magic != MAGIC or checksum != checksum_of(body) or not body.startswith(whose):
        return None
    bits = np.frombuffer(body, np.uint8, offset=_WHOSE.size + _RECORDS.size)
    trusted = np.unpackbits(bits, count=num_slots, bitorder="little").astype(bool)
    (records,) = _RECORDS.unpack_from(body, _WHOSE.size)
    return trusted if records == _of_records(trusted, table()) else None


def _of_records(trusted: Bools, table: Columns) -> int:
    """Return one checksum over the deciding records of the trusted slots."""
    counts = trusted & (table["kind"][: len(trusted)] == RecordKind.PUT)
    return checksum_of(np.where(counts, table["crc"][: len(trusted)], 0).astype("<u4").tobytes())


def read_trust(folder: Path, table: Callable[[], Columns], superblock: Superblock) -> Bools | None:
    """Return the trusted slots that the last owner recorded; None if the file cannot be used.

    Raises no error: without the file, all blocks are verified.
    """
    try:
        fd = open_file(folder / TRUST, os.O_RDONLY)
    except OSError:
        return None
    try:
        return decode(read_at(fd, num_bytes_of(superblock.num_slots), 0), table, superblock)
    except OSError:
        return None
    finally:
        os.close(fd)


def write_trust(
    folder: Path, trusted: Bools, table: Columns, superblock: Superblock, system: DiskSystem
) -> None:
    """Write the file, and wait until it is on the medium."""
    fd = open_file(folder / TRUST, os.O_RDWR | os.O_CREAT)
    try:
        system.write_at(fd, encode(trusted, table, superblock), 0)
        system.sync(fd)
    finally:
        os.close(fd)


def reserve_trust(folder: Path, num_slots: int, system: DiskSystem) -> None:
    """Reserve space for the file, so that a slab can be closed on a full file system."""
    fd = open_file(folder / TRUST, os.O_RDWR | os.O_CREAT)
    try:
        system.reserve_ahead(fd, num_bytes_of(num_slots))
    finally:
        os.close(fd)


def mark_of(found: os.stat_result) -> DataMark:
    """Return the state of the data file that a later owner compares."""
    return DataMark(found.st_ino, found.st_size, found.st_mtime_ns)
