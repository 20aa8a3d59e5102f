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

Numbers are little-endian. Blocks follow each other without a gap. A pack is named by the key of its
last block, so that the names of a prompt's packs follow from the prompt, and by a hash of all its
keys. Packs of the same name are equal byte for byte, so it does not matter which of them was
written last.

A coded pack is one with blocks that a codec or a key has changed (``codecs.frame``). Its magic is
"kvtierP2", its blocks have sizes of their own, and its name has a hash of its header instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from struct import Struct
from typing import Final, NewType

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtier.core.types import BlockKey
from kvtier.tiers.codecs.codec import RAW
from kvtier.tiers.codecs.frame import MAX_OVERHEAD
from kvtier.tiers.crc_join import checksum, copied_crcs
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.envelope import (
    HEADER_BYTES,
    KEY,
    Envelope,
    Headers,
    codec_behind,
    size_behind,
)
from kvtier.tiers.storage import Keys

Uint8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
PackName = NewType("PackName", bytes)
"""Key of the last block, and ``DIGEST_BYTES`` of a hash: of all keys, or of a coded header."""

MAGIC: Final = b"kvtierP1"
CODED_MAGIC: Final = b"kvtierP2"
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


@dataclass(frozen=True, slots=True, eq=False)
class PackCoding:
    """Facts of a coded pack, which its writer publishes with its keys.

    codec: number of the codec; some blocks may be as they are.
    key_id: id of the key that encrypted all blocks; 0 for none.
    digest: hash of the header.
    sizes: int64 [num_blocks], bytes of each block as stored.
    """

    codec: int
    key_id: int
    digest: bytes
    sizes: Int64s


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
        """Return the offset of block ``at`` of a pack that is not coded."""
        return self.header_bytes(num_blocks) + at * self.block_bytes

    def offsets(self, num_blocks: int, coding: PackCoding | None = None) -> Int64s:
        """Return int64 [num_blocks + 1]: the offset of each block, and the size of the pack."""
        begin = np.int64(self.header_bytes(num_blocks))
        if coding is None:
            return begin + self.block_bytes * np.arange(num_blocks + 1)
        return np.cumsum(np.concatenate([[begin], coding.sizes]))

    def build(
        self, keys: Sequence[BlockKey], blocks: Pieces, envelope: Envelope
    ) -> tuple[Uint8s, PackCoding | None]:
        """Return the bytes of a pack, with a copy of its blocks, and its coding if it has one.

        blocks: in host memory.
        """
        if envelope.coder.changes_blocks:
            return self._build_coded(keys, blocks, envelope)
        num_blocks = len(keys)
        offsets = self.offsets(num_blocks)
        made = np.empty(offsets[-1], np.uint8)
        begins = made.ctypes.data + offsets[:-1].astype(np.uint64)
        packed = Pieces.whole(begins, self.block_bytes)
        # Checksums of the copies: a source that is modified meanwhile, against the rules, still
        # gets a checksum that matches its copy.
        crcs = copied_crcs(packed.cut(blocks.sizes), blocks)
        self._write_header(made, MAGIC, offsets, envelope.headers(keys, packed, crcs))
        return made, None

    def _build_coded(
        self, keys: Sequence[BlockKey], blocks: Pieces, envelope: Envelope
    ) -> tuple[Uint8s, PackCoding]:
        num_blocks = len(keys)
        header_bytes = self.header_bytes(num_blocks)
        made = np.empty(header_bytes + num_blocks * envelope.coder.most_bytes, np.uint8)
        envelopes, sizes, used = [], [], header_bytes
        codec = key_id = RAW
        for at, key in enumerate(keys):
            header, num, head = envelope.encode(key, blocks.pick([at]), made[used:])
            envelopes.append(header)
            sizes.append(num)
            used += num
            if head is not None:
                codec, key_id = head.codec or codec, head.key_id
        made, num_bytes = made[:used], np.array(sizes, np.int64)
        offsets = np.cumsum(np.concatenate([[np.int64(header_bytes)], num_bytes]))
        self._write_header(made, CODED_MAGIC, offsets, envelopes)
        digest = _digest(made[:header_bytes].tobytes())
        return made, PackCoding(codec, key_id, digest, num_bytes)

    def _write_header(
        self, made: Uint8s, magic: bytes, offsets: Int64s, envelopes: Sequence[bytes]
    ) -> None:
        entries = np.empty(len(envelopes), ENTRY)
        entries["offset"], entries["size"] = offsets[:-1], np.diff(offsets)
        entries["envelope"] = np.frombuffer(b"".join(envelopes), f"V{HEADER_BYTES}")
        header = made[: self.header_bytes(len(envelopes))]
        header[:] = 0
        header[HEAD.size : HEAD.size + entries.nbytes] = entries.view(np.uint8)
        self._fill(header, magic, len(envelopes), 0)
        self._fill(header, magic, len(envelopes), checksum(header))

    def _fill(self, header: Uint8s, magic: bytes, num_blocks: int, check: int) -> None:
        head = HEAD.pack(magic, num_blocks, check, self.block_bytes)
        header[: HEAD.size] = np.frombuffer(head, np.uint8)

    def read_header(
        self, header: Uint8s, num_blocks: int, coding: PackCoding | None = None
    ) -> Headers | None:
        """Return the envelope header of each block; None if the header is invalid.

        coding: of the pack, as its writer has published it; None for a pack without one.
        """
        if len(header) != self.header_bytes(num_blocks):
            return None
        magic = MAGIC if coding is None else CODED_MAGIC
        entries = self._entries(header, magic, num_blocks)
        if entries is None:
            return None
        offsets = self.offsets(num_blocks, coding)
        are_ours = entries["offset"] == offsets[:-1]
        are_ours &= entries["size"] == np.diff(offsets)
        if not are_ours.all():
            return None
        return np.frombuffer(entries["envelope"].tobytes(), np.uint8).reshape(-1, HEADER_BYTES)

    def _entries(
        self, header: Uint8s, magic: bytes, num_blocks: int
    ) -> npt.NDArray[np.void] | None:
        """Return the records of ``ENTRY`` in a header; None if it is damaged or another one."""
        found, number, check, block_bytes = HEAD.unpack_from(header.tobytes())
        if (found, number, block_bytes) != (magic, num_blocks, self.block_bytes):
            return None
        copied = header.copy()
        self._fill(copied, magic, num_blocks, 0)
        if checksum(copied) != check:
            return None
        return np.frombuffer(header.tobytes(), ENTRY, num_blocks, HEAD.size)


@dataclass(frozen=True, slots=True)
class PackContents:
    """Contents of a pack, by its header.

    num_bytes: size of the pack.
    """

    name: PackName
    block_bytes: int
    keys: list[BlockKey]
    num_bytes: int
    coding: PackCoding | None


def contents_of(header: bytes) -> PackContents | None:
    """Return the contents of a pack from its header, which may be followed by more bytes.

    None if it is invalid or truncated.
    """
    if len(header) < HEAD.size:
        return None
    magic, number, _, block_bytes = HEAD.unpack_from(header)
    if not 0 < number <= MAX_BLOCKS or magic not in (MAGIC, CODED_MAGIC):
        return None
    shape = PackShape(block_bytes, 0)
    whole = np.frombuffer(header, np.uint8)[: shape.header_bytes(number)]
    if len(whole) < shape.header_bytes(number):
        return None
    entries = shape._entries(whole, magic, number)
    if entries is None:
        return None
    coding = None
    if magic == CODED_MAGIC:
        sizes = entries["size"].astype(np.int64)
        coding = PackCoding(RAW, 0, _digest(whole.tobytes()), sizes)
    found = shape.read_header(whole, number, coding)
    if found is None:
        return None
    envelopes = [each.tobytes() for each in found]
    keys = [BlockKey(envelope[KEY]) for envelope in envelopes]
    sizes_behind = [
        size_behind(envelope, key) for envelope, key in zip(envelopes, keys, strict=True)
    ]
    if sizes_behind != entries["size"].tolist():
        return None
    if coding is not None:
        codecs = [codec_behind(envelope) for envelope in envelopes]
        codec, key_id = max(codec[0] for codec in codecs), max(codec[1] for codec in codecs)
        coding = replace(coding, codec=codec, key_id=key_id)
    array = np.frombuffer(b"".join(keys), "V32")
    num_bytes = int(shape.offsets(number, coding)[-1])
    return PackContents(pack_name(array, coding), block_bytes, keys, num_bytes, coding)


def are_possible(sizes: Int64s, block_bytes: int) -> bool:
    """Return whether blocks of ``block_bytes`` can have these sizes as stored."""
    return bool((sizes > 0).all() and (sizes <= block_bytes + MAX_OVERHEAD).all())


def pack_name(keys: Keys, coding: PackCoding | None = None) -> PackName:
    """Return the name of the pack of these blocks. keys: V32 [num_blocks]."""
    digest = coding.digest if coding is not None else _digest(keys.tobytes())
    return PackName(keys[-1:].tobytes() + digest)


def pack_path(name: PackName) -> str:
    """Return the path of a pack below the prefix, fanned out for servers that use folders."""
    key, digest = name[:-DIGEST_BYTES].hex(), name[-DIGEST_BYTES:].hex()
    return f"packs/{key[:2]}/{key}-{digest}"


def pack_name_of(path: str) -> PackName | None:
    """Return the name of the pack at ``path``; None if no pack has this path."""
    try:
        name = PackName(bytes.fromhex(path.rpartition("/")[2].replace("-", "", 1)))
    except ValueError:
        return None
    return name if len(name) == NAME_BYTES and pack_path(name) == path else None


def _digest(content: bytes) -> bytes:
    return blake3(content).digest(DIGEST_BYTES)
