"""Which blocks need not be verified: what was found out about them outlives a clean close.

The file ``trust``, little-endian:

      0  8 bytes "kvttrust"          8  u32 crc32c of the bytes from 12 on
     12  16 bytes id of the slab    28  u64 session that closed it    36  u64 number of slots
     44  a bit per slot, the lowest one first: its block was written or verified by an owner
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier._hot import crc32c
from kvtier.tiers.disk.folder import TRUST, open_file
from kvtier.tiers.disk.superblock import DataMark, Superblock
from kvtier.tiers.disk.system import DiskSystem, read_at

MAGIC: Final = b"kvttrust"
_HEAD: Final = struct.Struct("<8sI")
_WHOSE: Final = struct.Struct("<16sQQ")

Bools = npt.NDArray[np.bool_]


def num_bytes_of(num_slots: int) -> int:
    """Size of the file."""
    return _HEAD.size + _WHOSE.size + -(-num_slots // 8)


def encode(trusted: Bools, superblock: Superblock) -> bytes:
    """The file's content. trusted: bool [num_slots]."""
    whose = _WHOSE.pack(superblock.slab_id, superblock.member.session, len(trusted))
    body = whose + np.packbits(trusted, bitorder="little").tobytes()
    return _HEAD.pack(MAGIC, _checksum(body)) + body


def decode(content: bytes, superblock: Superblock) -> Bools | None:
    """bool [num_slots]; None where the content is damaged, or is not that of the close which
    ``superblock`` tells of."""
    num_slots = superblock.num_slots
    if len(content) < num_bytes_of(num_slots):
        return None
    content = content[: num_bytes_of(num_slots)]
    magic, checksum = _HEAD.unpack_from(content)
    body = content[_HEAD.size :]
    whose = _WHOSE.pack(superblock.slab_id, superblock.member.session, num_slots)
    if magic != MAGIC or checksum != _checksum(body) or not body.startswith(whose):
        return None
    bits = np.frombuffer(body, np.uint8, offset=_WHOSE.size)
    return np.unpackbits(bits, count=num_slots, bitorder="little").astype(bool)


def read_trust(folder: Path, superblock: Superblock) -> Bools | None:
    """What the last owner left; None where it can't be used. Never an error: what is not trusted
    is verified."""
    try:
        fd = open_file(folder / TRUST, os.O_RDONLY)
    except OSError:
        return None
    try:
        return decode(read_at(fd, num_bytes_of(superblock.num_slots), 0), superblock)
    except OSError:
        return None
    finally:
        os.close(fd)


def write_trust(folder: Path, trusted: Bools, superblock: Superblock, system: DiskSystem) -> None:
    """Write the file, and wait until it is on the medium."""
    fd = open_file(folder / TRUST, os.O_RDWR | os.O_CREAT)
    try:
        system.write_at(fd, encode(trusted, superblock), 0)
        system.sync(fd)
    finally:
        os.close(fd)


def reserve_trust(folder: Path, num_slots: int, system: DiskSystem) -> None:
    """Have room for the file, so that a full file system does not keep a slab from closing."""
    fd = open_file(folder / TRUST, os.O_RDWR | os.O_CREAT)
    try:
        system.reserve_ahead(fd, num_bytes_of(num_slots))
    finally:
        os.close(fd)


def mark_of(found: os.stat_result) -> DataMark:
    """What a later owner compares."""
    return DataMark(found.st_ino, found.st_size, found.st_mtime_ns)


def _checksum(body: bytes) -> int:
    return crc32c(np.frombuffer(body, np.uint8).ctypes.data, len(body))
