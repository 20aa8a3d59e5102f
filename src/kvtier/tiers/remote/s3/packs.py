"""Packs: several blocks in one object, behind a header.

    magic    8   "kvtierP1"
    number   4   of blocks
    check    4   crc32c of the header, with zeros here
    size     8   of each block
    of each block
      offset   8
      size     8
      envelope     its key, size, checksum and tag: see ``envelope``
    zeros        up to a multiple of 4 KiB: the header ends here, and the first block begins

Numbers are little-endian. A pack is named by the key of its last block, so that the names of a
prompt's packs follow from the prompt, and by a hash of all its keys. Packs of the same name are
equal byte for byte, so it does not matter which of them was written last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, NewType

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtier._hot import crc32c_rows
from kvtier.tiers.crc_join import copied_crcs
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.envelope import HEADER_BYTES, KEY, Envelope, Headers, size_behind
from kvtier.tiers.storage import Keys
from kvtier.types import BlockKey

Uint8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
PackName = NewType("PackName", bytes)
"""Key of the last block, and ``DIGEST_BYTES`` of a hash of all keys."""

MAGIC: Final = b"kvtierP1"
HEAD: Final = Struct("<8sIIQ")
PLACE: Final = Struct("<QQ")
ENTRY_BYTES: Final = PLACE.size + HEADER_BYTES
ENTRY: Final = np.dtype([("offset", "<u8"), ("size", "<u8"), ("envelope", f"V{HEADER_BYTES}")])
"""Entry of one block, as a numpy record."""
ALIGNMENT: Final = 4096
"""Alignment of the header's end, so that a device can read blocks directly from a cached object."""
PACK_BYTES: Final = 31 << 19
"""Default size of a pack's blocks. Four responses of this size fit into one 64 MiB heap of glibc's
malloc. With 16 MiB the fourth needs another heap, whose pages return to the kernel each time."""
DIGEST_BYTES: Final = 8
NAME_BYTES: Final = 32 + DIGEST_BYTES
MAX_BLOCKS: Final = 512
"""Blocks per pack. The header is read with any block, so it must be small in comparison."""


@dataclass(frozen=True, slots=True)
class PackShape:
    """Layout of packs of blocks of ``block_bytes``. pack_bytes: approximate size of a pack."""

    block_bytes: int
    pack_bytes: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks of a full pack."""
        return min(MAX_BLOCKS, max(1, self.pack_bytes // self.block_bytes))

    def header_bytes(self, num_blocks: int) -> int:
        """Return the header size of a pack of ``num_blocks`` blocks."""
        return -(-(HEAD.size + num_blocks * ENTRY_BYTES) // ALIGNMENT) * ALIGNMENT

    def offset(self, num_blocks: int, at: int) -> int:
        """Return the offset of block ``at``; that of block ``num_blocks`` is the pack's size."""
        return self.header_bytes(num_blocks) + at * self.block_bytes

    def offsets(self, num_blocks: int, at: npt.ArrayLike) -> Int64s:
        """Return the offsets of blocks. at: int64 [num_wanted]."""
        return self.header_bytes(num_blocks) + np.asarray(at, np.int64) * self.block_bytes

    def build(self, keys: Sequence[BlockKey], blocks: Pieces, envelope: Envelope) -> Uint8s:
        """Return the bytes of a pack, with a copy of its blocks, which are in host memory."""
        num_blocks = len(keys)
        made = np.empty(self.offset(num_blocks, num_blocks), np.uint8)
        header = made[: self.header_bytes(num_blocks)]
        header[:] = 0
        begin = made.ctypes.data + self.header_bytes(num_blocks)
        begins = begin + self.block_bytes * np.arange(num_blocks, dtype=np.uint64)
        packed = Pieces.whole(begins, self.block_bytes)
        # Checksums of the copies: a source that is modified meanwhile, against the rules, still
        # gets a checksum that matches its copy.
        crcs = copied_crcs(packed.cut(blocks.sizes), blocks)
        envelopes = envelope.headers(keys, packed, crcs)
        entries = b"".join(
            PLACE.pack(self.offset(num_blocks, at), self.block_bytes) + each
            for at, each in enumerate(envelopes)
        )
        self._fill(header, num_blocks, 0)
        header[HEAD.size : HEAD.size + len(entries)] = np.frombuffer(entries, np.uint8)
        self._fill(header, num_blocks, _check(header))
        return made

    def _fill(self, header: Uint8s, num_blocks: int, check: int) -> None:
        head = HEAD.pack(MAGIC, num_blocks, check, self.block_bytes)
        header[: HEAD.size] = np.frombuffer(head, np.uint8)

    def read_header(self, header: Uint8s, num_blocks: int) -> Headers | None:
        """Return the envelope header of each block; None if the header is invalid."""
        if len(header) != self.header_bytes(num_blocks):
            return None
        whole = header.tobytes()
        magic, number, check, block_bytes = HEAD.unpack_from(whole)
        if (magic, number, block_bytes) != (MAGIC, num_blocks, self.block_bytes):
            return None
        copied = header.copy()
        self._fill(copied, num_blocks, 0)
        if _check(copied) != check:
            return None
        entries = np.frombuffer(whole, ENTRY, num_blocks, HEAD.size)
        are_ours = entries["offset"] == self.offsets(num_blocks, np.arange(num_blocks))
        are_ours &= entries["size"] == self.block_bytes
        if not are_ours.all():
            return None
        return np.frombuffer(entries["envelope"].tobytes(), np.uint8).reshape(-1, HEADER_BYTES)


def keys_in(header: bytes) -> tuple[int, list[bytes]] | None:
    """Return block size and keys from a pack's header, which may be followed by more bytes.

    None if it is invalid or truncated.
    """
    if len(header) < HEAD.size:
        return None
    _, number, _, block_bytes = HEAD.unpack_from(header)
    if not 0 < number <= MAX_BLOCKS:
        return None
    shape = PackShape(block_bytes, 0)
    whole = np.frombuffer(header, np.uint8)[: shape.header_bytes(number)]
    found = shape.read_header(whole, number)
    if found is None:
        return None
    envelopes = [each.tobytes() for each in found]
    keys = [each[KEY] for each in envelopes]
    sizes = {size_behind(each, key) for each, key in zip(envelopes, keys, strict=True)}
    return (block_bytes, keys) if sizes == {block_bytes} else None


def pack_name(keys: Keys) -> PackName:
    """Return the name of the pack of these blocks. keys: V32 [num_blocks]."""
    return PackName(keys[-1:].tobytes() + blake3(keys.tobytes()).digest(DIGEST_BYTES))


def pack_path(name: PackName) -> str:
    """Return the path of a pack below the prefix, fanned out for servers that use folders."""
    key, digest = name[:-DIGEST_BYTES].hex(), name[-DIGEST_BYTES:].hex()
    return f"packs/{key[:2]}/{key}-{digest}"


def _check(header: Uint8s) -> int:
    return int(crc32c_rows(header.reshape(1, -1))[0])
