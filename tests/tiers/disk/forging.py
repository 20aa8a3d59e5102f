"""Changes to a slab's files that keep every checksum right, as an attacker could make."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from kvtier.core.hot import crc32c
from kvtier.tiers.disk.format.records import RECORD, Records, seal
from kvtier.tiers.disk.format.superblock import HALF_BYTES

FIELDS = {
    "version": (12, "<H"),
    "flags": (14, "<H"),
    "epoch": (16, "<Q"),
    "slot_bytes": (24, "<Q"),
    "block_bytes": (32, "<Q"),
    "num_slots": (40, "<Q"),
    "rank": (48, "<I"),
    "num_ranks": (52, "<I"),
    "generation": (56, "<Q"),
    "journal_bytes": (64, "<Q"),
    "made_at": (72, "<Q"),
    "slab_id": (80, "16s"),
    "layout": (96, "32s"),
    "set_id": (128, "16s"),
    "step": (144, "<Q"),
    "session": (152, "<Q"),
    "previous": (160, "<Q"),
    "data_inode": (168, "<Q"),
    "data_bytes": (176, "<Q"),
    "data_mtime_ns": (184, "<Q"),
    "description_bytes": (192, "<I"),
    "description": (196, "3900s"),
}
"""Fields of a superblock: offset and format. See docs/formats/slab.md."""


def put_field(half: bytearray, name: str, value: int | bytes) -> None:
    """Set a field of a superblock, and its checksum."""
    offset, form = FIELDS[name]
    struct.pack_into(form, half, offset, value)
    if name == "description":
        assert isinstance(value, bytes)
        struct.pack_into("<I", half, FIELDS["description_bytes"][0], len(value))
    body = np.frombuffer(half, np.uint8)[12:]
    struct.pack_into("<I", half, 8, crc32c(body.ctypes.data, len(body)))


def forge_superblock(slab: Path, **fields: int | bytes) -> None:
    """Set fields of both superblocks of the slab in a directory."""
    content = bytearray((slab / "superblock").read_bytes())
    for start in (0, HALF_BYTES):
        half = content[start : start + HALF_BYTES]
        for name, value in fields.items():
            put_field(half, name, value)
        content[start : start + HALF_BYTES] = half
    (slab / "superblock").write_bytes(content)


def read_records(slab: Path) -> Records:
    """Return all records of the slab's journal, writable."""
    content = (slab / "journal").read_bytes()
    return np.frombuffer(content[: len(content) // 64 * 64], RECORD).copy()


def write_records(slab: Path, records: Records) -> None:
    """Write records over the slab's journal, with right checksums."""
    seal(records)
    (slab / "journal").write_bytes(records.tobytes())
