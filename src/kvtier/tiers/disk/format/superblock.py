"""The two superblocks: description of the slab, and whether it was closed in order.

Each half of the file ``superblock`` is 4096 bytes, little-endian. A change writes the half that the
parity of the epoch selects, so the other half stays whole, whatever happens.

      0  8 bytes "kvtslab\\n"        8  u32 crc32c of the bytes 12..4096
     12  u16 format version         14  u16 flags (1: clean)        16  u64 epoch
     24  u64 slot_bytes             32  u64 block_bytes             40  u64 num_slots
     48  u32 rank                   52  u32 num_ranks               56  u64 journal's generation
     64  u64 bytes of the journal at a clean close                  72  u64 made at, unix time
     80  16 bytes id of the slab    96  32 bytes layout fingerprint, ASCII
    128  16 bytes id of the set    144  u64 step of the set
    152  u64 session               160  u64 session before it
    168  u64 inode of the data     176  u64 bytes of the data      184  i64 mtime of the data, ns
    192  u32 length of the description, then the description: JSON, UTF-8

"""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvtier.core.hot import crc32c
from kvtier.layout import KVGroup

FORMAT_VERSION: Final = 2
MAGIC: Final = b"kvtslab\n"
HALF_BYTES: Final = 4096
FLAG_CLEAN: Final = 1
_HEAD: Final = struct.Struct("<8sI")
_COMMON: Final = struct.Struct("<HHQQQQIIQQQ16s32s")
_COMMON_FIELDS: Final = (
    "version", "flags", "epoch", "slot_bytes", "block_bytes", "num_slots", "rank", "num_ranks",
    "generation", "journal_bytes", "made_at", "slab_id", "layout",
)  # fmt: skip
_SET: Final = struct.Struct("<16sQQQQQq")
_LENGTH: Final = struct.Struct("<I")
_MAX_TEXT: Final = HALF_BYTES - _HEAD.size - _COMMON.size - _SET.size - _LENGTH.size
SET_ID_BYTES: Final = 16
NO_SET: Final = bytes(SET_ID_BYTES)


@dataclass(frozen=True, slots=True)
class Membership:
    """Membership of a slab in a set, over which each block is cut; see ``membership``.

    set_id: id of the set.
    step: counter of openings and closings of the set.
    session: random number of the opening that this step belongs to.
    previous: session of the opening before.
    """

    set_id: bytes = NO_SET
    step: int = 0
    session: int = 0
    previous: int = 0


@dataclass(frozen=True, slots=True)
class DataMark:
    """State of ``data.slab`` at a clean close. Any later write to the file changes it."""

    inode: int = 0
    num_bytes: int = 0
    mtime_ns: int = 0


@dataclass(frozen=True, slots=True)
class Superblock:
    """Content of one superblock. The whole superblock with the highest ``epoch`` is current."""

    slot_bytes: int
    block_bytes: int
    num_slots: int
    rank: int
    num_ranks: int
    layout: str
    description: str
    slab_id: bytes
    made_at: int
    epoch: int = 0
    generation: int = 0
    journal_bytes: int = 0
    is_clean: bool = False
    version: int = FORMAT_VERSION
    member: Membership = Membership()
    data: DataMark = DataMark()

    def encode(self) -> bytes:
        """Return the superblock's 4096 bytes."""
        text = self.description.encode()
        encoded = {"flags": FLAG_CLEAN if self.is_clean else 0, "layout": self.layout.encode()}
        body = _COMMON.pack(
            *(encoded[name] if name in encoded else getattr(self, name) for name in _COMMON_FIELDS)
        )
        body += _SET.pack(*dataclasses.astuple(self.member), *dataclasses.astuple(self.data))
        body = (body + _LENGTH.pack(len(text)) + text).ljust(HALF_BYTES - _HEAD.size, b"\0")
        assert len(body) == HALF_BYTES - _HEAD.size, "the description of the layout is too long"
        return _HEAD.pack(MAGIC, checksum_of(body)) + body


def decode(half: bytes) -> Superblock | None:
    """Decode the superblock in 4096 bytes; None if it is torn or none at all.

    Its texts are printable. Its numbers are unchecked; see ``limits.check_superblock``. For an
    unknown version only ``version`` is valid.
    """
    if len(half) != HALF_BYTES:
        return None
    magic, checksum = _HEAD.unpack_from(half)
    body = half[_HEAD.size :]
    if magic != MAGIC or checksum != checksum_of(body):
        return None
    common: dict[str, Any] = dict(zip(_COMMON_FIELDS, _COMMON.unpack_from(body), strict=True))
    flags, layout = common.pop("flags"), common.pop("layout")
    at = _COMMON.size
    *whose, inode, num_bytes, mtime_ns = _SET.unpack_from(body, at)
    at += _SET.size
    (length,) = _LENGTH.unpack_from(body, at)
    at += _LENGTH.size
    texts = _text(layout.rstrip(b"\0")), _text(body[at : at + length])
    if common["version"] == FORMAT_VERSION and (None in texts or at + length > len(body)):
        return None  # no owner writes this
    return Superblock(
        **common,
        layout=texts[0] or "",
        description=texts[1] or "",
        is_clean=bool(flags & FLAG_CLEAN),
        member=Membership(*whose),
        data=DataMark(inode, num_bytes, mtime_ns),
    )


def decode_both(content: bytes) -> tuple[Superblock | None, int]:
    """Return the newest whole superblock of the file's content, and how many are whole."""
    halves = (content[:HALF_BYTES], content[HALF_BYTES : 2 * HALF_BYTES])
    whole = [found for half in halves if (found := decode(half)) is not None]
    return max(whole, key=lambda each: each.epoch, default=None), len(whole)


def describe(group: KVGroup) -> str:
    """Return a JSON description of a block, for messages about a slab of another layout."""
    fields = dataclasses.asdict(group)
    text = json.dumps(fields, separators=(",", ":"))
    if len(text.encode()) > _MAX_TEXT:
        fields["parts"] = f"{len(group.parts)} parts"
        text = json.dumps(fields, separators=(",", ":"))
    return text


def _text(content: bytes) -> str | None:
    """Decode UTF-8; None if it is invalid or not printable (terminal control characters)."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() else None


def checksum_of(body: bytes) -> int:
    """Return the crc32c of some bytes."""
    return crc32c(np.frombuffer(body, np.uint8).ctypes.data, len(body))
