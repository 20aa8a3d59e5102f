"""Manifests: a writer's list of its packs, and of blocks that must not be used.

    magic    8   "kvtierM1"
    check    4   crc32c of all, with zeros here
    packs    4   how many
    tombstones   4   how many
    zeros    4
    size     8   of each block in these packs
    of each pack
      stamp    8
      blocks   4   how many
      keys    32   of each block, in their order
    of each tombstone
      stamp    8
      key     32

A manifest of coded packs has the magic "kvtierM2", and says more of each pack:

      stamp    8
      blocks   4   how many
      codec    4   its number
      key id   4
      zeros    4
      digest   8   second part of the pack's name
      keys    32   of each block
      sizes    4   of each block, as stored

Numbers are little-endian. Stamps order statements on a key: a tombstone applies to packs that are
not newer. A stamp is the writer's clock in nanoseconds, or more if stamps that it has read are
ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError
from typing import Final

import numpy as np

from kvtier.core.types import BlockKey
from kvtier.tiers.crc_join import checksum
from kvtier.tiers.remote.bucket.packs import (
    MAX_BLOCKS,
    PackCoding,
    PackName,
    are_possible,
    pack_name,
)
from kvtier.tiers.storage import Keys

MAGIC: Final = b"kvtierM1"
CODED_MAGIC: Final = b"kvtierM2"
HEAD: Final = Struct("<8sIIIIQ")
PACK: Final = Struct("<QI")
CODED_PACK: Final = Struct("<QIIII8s")
TOMBSTONE: Final = Struct("<Q32s")
KEY_BYTES: Final = 32
SIZE: Final = np.dtype("<u4")
MAX_BYTES: Final = 64 << 20
"""Largest size of a manifest: two million blocks. A larger one was not written by kvtier."""


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """A pack that was written.

    keys: V32 [num_blocks], of its blocks, in order.
    coding: None for a pack whose blocks are as they are.
    """

    stamp: int
    keys: Keys
    coding: PackCoding | None = None

    @property
    def name(self) -> PackName:
        return pack_name(self.keys, self.coding)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A deleted block, which must not be found in packs up to ``stamp``."""

    stamp: int
    key: BlockKey


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of one manifest. Either all of its packs are coded or none is.

    block_bytes: size of each block of its packs.
    """

    block_bytes: int
    packs: Sequence[Pack] = ()
    tombstones: Sequence[Tombstone] = ()

    @property
    def newest(self) -> int:
        """The newest stamp; 0 if there is none."""
        stamps = [pack.stamp for pack in self.packs] + [
            tombstone.stamp for tombstone in self.tombstones
        ]
        return max(stamps, default=0)

    def to_bytes(self) -> bytes:
        magic = CODED_MAGIC if any(pack.coding for pack in self.packs) else MAGIC
        parts = []
        for pack in self.packs:
            parts += [_packed(pack), pack.keys.tobytes()]
            if pack.coding is not None:
                parts.append(pack.coding.sizes.astype("<u4").tobytes())
        parts += [TOMBSTONE.pack(tombstone.stamp, tombstone.key) for tombstone in self.tombstones]
        body = b"".join(parts)
        counts = len(self.packs), len(self.tombstones)
        check = checksum(HEAD.pack(magic, 0, *counts, 0, self.block_bytes) + body)
        return HEAD.pack(magic, check, *counts, 0, self.block_bytes) + body

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest | None:
        """Parse a manifest. Return None if it is invalid or damaged."""
        try:
            return cls._read(content)
        except StructError:
            return None

    @classmethod
    def _read(cls, content: bytes) -> Manifest | None:
        magic, check, num_packs, num_tombstones, zeros, block_bytes = HEAD.unpack_from(content)
        above = HEAD.pack(magic, 0, num_packs, num_tombstones, zeros, block_bytes)
        if magic not in (MAGIC, CODED_MAGIC) or checksum(above + content[HEAD.size :]) != check:
            return None
        packs, at = [], HEAD.size
        for _ in range(num_packs):
            pack, at = _read_pack(content, at, magic == CODED_MAGIC)
            if pack is None or not is_pack(pack, block_bytes):
                return None
            packs.append(pack)
        tombstones = []
        for _ in range(num_tombstones):
            stamp, key = TOMBSTONE.unpack_from(content, at)
            tombstones.append(Tombstone(stamp, BlockKey(key)))
            at += TOMBSTONE.size
        return cls(block_bytes, packs, tombstones) if at == len(content) else None


def _packed(pack: Pack) -> bytes:
    if (coding := pack.coding) is None:
        return PACK.pack(pack.stamp, len(pack.keys))
    ids = coding.codec, coding.key_id, 0
    return CODED_PACK.pack(pack.stamp, len(pack.keys), *ids, coding.digest)


def _read_pack(content: bytes, at: int, is_coded: bool) -> tuple[Pack | None, int]:
    """Return the pack that is described at ``at``, and where its description ends.

    None if there is none. Raises ``StructError`` if the content is too short for one.
    """
    coding, size_bytes = None, SIZE.itemsize if is_coded else 0
    if is_coded:
        stamp, num_blocks, codec, key_id, _, digest = CODED_PACK.unpack_from(content, at)
    else:
        stamp, num_blocks = PACK.unpack_from(content, at)
    begin = at + (CODED_PACK if is_coded else PACK).size
    sizes_at = begin + KEY_BYTES * num_blocks
    end = sizes_at + size_bytes * num_blocks
    if not 0 < num_blocks <= MAX_BLOCKS or end > len(content):
        return None, at
    if is_coded:
        sizes = np.frombuffer(content, SIZE, num_blocks, sizes_at).astype(np.int64)
        coding = PackCoding(codec, key_id, digest, sizes)
    return Pack(stamp, np.frombuffer(content, "V32", num_blocks, begin), coding), end


def is_pack(pack: Pack, block_bytes: int) -> bool:
    """Return whether the sizes of a pack's blocks are possible."""
    return pack.coding is None or are_possible(pack.coding.sizes, block_bytes)


def manifest_path(writer: str, number: int) -> str:
    """Return the path of a manifest below the prefix."""
    return f"manifests/{writer}/{number:08d}"


def writer_of(path: str) -> str:
    """Return the writer of a manifest."""
    return path.split("/")[-2]
