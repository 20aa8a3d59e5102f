"""Header in front of a block's bytes in a store, so that no other data is taken for a block.

    magic   8   "kvtierB1"
    flags   4   1: it is tagged
    crc     4   crc32c of the block's bytes
    size    8   of the block
    key    32   of the block: prefix, model, dtype and layout are in it
    tag    32   keyed BLAKE3 of all above and of the block's bytes; zeros where it is not tagged
    check   4   crc32c of all above
    zeros   4

A block that a codec or a key has changed (``codecs.frame``) has another header of the same length.

    magic   8   "kvtierB2"
    flags   4   1: it is tagged; bits 8 to 15: number of the codec
    crc     4   crc32c of the frame
    size    8   of the frame
    key    32   of the block
    tag    32   keyed BLAKE3 of all above and of the frame; zeros where it is not tagged
    check   4   crc32c of all above, and of what follows
    key id  4   of the key that encrypted it; 0 for none

Numbers are little-endian. A checksum detects accidental damage. Only a tag, which needs a secret
that all processes share, detects blocks written by others.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Sequence
from struct import Struct
from threading import Lock
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtier.core.hot import crc32c_rows
from kvtier.core.types import BlockKey
from kvtier.tiers.codecs.codec import RAW, Uint8s
from kvtier.tiers.codecs.frame import BlockCoder, FrameHead
from kvtier.tiers.crc_join import Uint32s, checksum, copied_crcs
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import Keys, Outcome

logger = logging.getLogger(__name__)

Headers = npt.NDArray[np.uint8]
"""Headers of blocks: uint8 [num_blocks, HEADER_BYTES]."""
Bools = npt.NDArray[np.bool_]

MAGIC: Final = b"kvtierB1"
CODED_MAGIC: Final = b"kvtierB2"
HEAD: Final = Struct("<8sIIQ32s")
TAG_BYTES: Final = 32
CHECK: Final = Struct("<II")
KEY_ID: Final = Struct("<I")
HEADER_BYTES: Final = HEAD.size + TAG_BYTES + CHECK.size
TAGGED: Final = 1
CODEC_SHIFT: Final = 8
BYTE: Final = 0xFF
KEY_BYTES: Final = 32
KEY: Final = slice(HEAD.size - KEY_BYTES, HEAD.size)
FIELDS: Final = np.dtype(
    [
        ("magic", "V8"),
        ("flags", "<u4"),
        ("crc", "<u4"),
        ("size", "<u8"),
        ("key", "V32"),
        ("tag", "V32"),
        ("check", "<u4"),
        ("key_id", "<u4"),
    ]
)
"""Header as a numpy record; of a block that is stored as it is, ``key_id`` is 0."""


MAX_OTHERS: Final = 1 << 16
"""Blocks with the tag of another secret that are remembered."""

THERE, ABSENT, DAMAGED, _ = Outcome


class Envelope:
    """Makes headers and verifies blocks against them. Thread-safe.

    block_bytes: size of every block.
    secret: for tags; b"" to neither write nor require tags.
    coder: changes blocks on their way; None to store and accept them only as they are.
    """

    def __init__(
        self, block_bytes: int, secret: bytes = b"", coder: BlockCoder | None = None
    ) -> None:
        self._block_bytes = block_bytes
        self._tag_key = blake3(secret).digest() if secret else b""
        self._others: dict[bytes, None] = {}  # oldest first
        self._remembering = Lock()
        self.coder = coder or BlockCoder(block_bytes)

    def __repr__(self) -> str:
        return f"Envelope({self._block_bytes}, {'tagged' if self._tag_key else 'not tagged'})"

    def headers(self, keys: Sequence[BlockKey], blocks: Pieces, crcs: Uint32s) -> list[bytes]:
        """Return a header of ``HEADER_BYTES`` for each block; blocks are in host memory.

        crcs: uint32 [num_blocks], of the blocks.
        """
        flags = TAGGED if self._tag_key else 0
        made = []
        for at, crc in enumerate(crcs.tolist()):
            head = HEAD.pack(MAGIC, flags, crc, self._block_bytes, keys[at])
            above = head + self._tag(head, blocks, at)
            made.append(above + CHECK.pack(checksum(above), 0))
        return made

    def coded_header(self, key: BlockKey, head: FrameHead, frame: Uint8s) -> bytes:
        """Return the header of a frame. head: the frame's own header."""
        flags = (TAGGED if self._tag_key else 0) | head.codec << CODEC_SHIFT
        above = HEAD.pack(CODED_MAGIC, flags, checksum(frame), len(frame), key)
        above += self._tag(above, Pieces.whole([frame.ctypes.data], len(frame)), 0)
        check = checksum(above + KEY_ID.pack(head.key_id))
        return above + CHECK.pack(check, head.key_id)

    def encode(
        self, key: BlockKey, block: Pieces, into: Uint8s
    ) -> tuple[bytes, int, FrameHead | None]:
        """Write the stored form of a block, and return its header, its size, and its frame's.

        It is a frame; a block that the coder does not change is copied, and has no frame.

        block: one block in host memory.
        into: uint8 [``coder.most_bytes``] at least.
        """
        head = self.coder.encode(key, block, into)
        if head is not None:
            return self.coded_header(key, head, into[: head.num_bytes]), head.num_bytes, head
        whole = Pieces.whole([into.ctypes.data], self._block_bytes)
        crcs = copied_crcs(whole.cut(block.sizes), block)
        return self.headers([key], whole, crcs)[0], self._block_bytes, None

    def are_of(self, headers: Sequence[bytes | None], keys: Sequence[BlockKey]) -> list[bool]:
        """Return whether each is a valid header of its key.

        A header of the wrong length is invalid.
        """
        whole = [
            at
            for at, header in enumerate(headers)
            if header is not None and len(header) == HEADER_BYTES
        ]
        found = np.zeros(len(headers), bool)
        found[whole] = self._are_of(
            as_headers([headers[at] or b"" for at in whole]), as_keys([keys[at] for at in whole])
        )
        are_ours: list[bool] = found.tolist()
        return are_ours

    def are_blocks(self, headers: Headers, keys: Keys, blocks: Pieces, crcs: Uint32s) -> Bools:
        """Return whether each block is intact and is its key's, by its header: bool [num_blocks].

        Blocks are in host memory.

        keys: V32 [num_blocks].
        crcs: uint32 [num_blocks], of the blocks.
        """
        are_ours = self._are_of(headers, keys) & ~are_coded(headers)
        are_ours &= _fields(headers)["crc"] == crcs
        for at in np.flatnonzero(are_ours).tolist() if self._tag_key else ():
            header = headers[at].tobytes()
            are_ours[at] = self._is_tagged(header, blocks, at)
        return are_ours

    def is_others(self, key: BlockKey) -> bool:
        """Return whether a block was intact when it was read, and tagged with another secret.

        Replicas with that secret use it: it must be neither removed nor replaced.
        """
        return key in self._others

    def decode(self, header: bytes, key: BlockKey, stored: Uint8s, block: Pieces) -> Outcome:
        """Verify what ``encode`` wrote by its header, and write the block to its memory.

        Returns ``THERE``, ``DAMAGED``, or ``ABSENT`` for a codec or a key that is not known here;
        the memory is unchanged then.

        stored: uint8 [n], as many bytes as the header says.
        block: one block in host memory.
        """
        if size_behind(header, key) != len(stored):
            return DAMAGED
        headers = as_headers([header])
        whole = Pieces.whole([stored.ctypes.data], len(stored))
        if not are_coded(headers)[0]:
            if self.coder.is_encrypting:
                return ABSENT
            if len(stored) != self._block_bytes:
                return DAMAGED
            crcs = copied_crcs(block, whole.cut(block.sizes))
            return THERE if self.are_blocks(headers, as_keys([key]), whole, crcs)[0] else DAMAGED
        if not self.coder.can_read(*codec_behind(header)):
            return ABSENT
        is_intact = self.are_of([header], [key])[0]
        is_intact &= int(_fields(headers)["crc"][0]) == checksum(stored)
        if not is_intact or (self._tag_key and not self._is_tagged(header, whole, 0)):
            return DAMAGED
        return self.coder.decode(key, stored, block)

    def _are_of(self, headers: Headers, keys: Keys) -> Bools:
        """Return bool [n]: whether each is a valid header of its key."""
        fields = _fields(headers)
        are_ours: Bools = fields["magic"] == np.void(MAGIC)
        are_ours &= not self.coder.is_encrypting
        are_ours &= fields["size"] == self._block_bytes
        are_ours &= fields["check"] == crc32c_rows(headers[:, : -CHECK.size])
        are_ours &= fields["key_id"] == 0
        for at in np.flatnonzero(fields["magic"] == np.void(CODED_MAGIC)).tolist():
            num_bytes = size_behind(headers[at].tobytes(), keys[at].tobytes())
            is_possible = num_bytes is not None and num_bytes <= self.coder.most_bytes
            are_ours[at] = is_possible and self.coder.can_read(*_codec_of(fields[at]))
        are_ours &= fields["key"] == keys
        if self._tag_key:
            are_ours &= (fields["flags"] & TAGGED) != 0
        return are_ours

    def _is_tagged(self, header: bytes, blocks: Pieces, at: int) -> bool:
        """Whether an intact block has a tag of the secret here. Remembers those of others."""
        head, tag = header[: HEAD.size], header[HEAD.size : -CHECK.size]
        if hmac.compare_digest(tag, self._tag(head, blocks, at)):
            with self._remembering:
                self._others.pop(header[KEY], None)
            return True
        with self._remembering:
            is_first = not self._others
            if len(self._others) >= MAX_OTHERS:
                del self._others[next(iter(self._others))]
            self._others[header[KEY]] = None
        if is_first:
            logger.warning(
                "the store has blocks with the tag of another secret: they are not used and not "
                "removed; give all processes the same KVTIER_STORE_SECRET or secret_file"
            )
        return False

    def _tag(self, head: bytes, blocks: Pieces, at: int) -> bytes:
        if not self._tag_key:
            return bytes(TAG_BYTES)
        made = blake3(head, key=self._tag_key)
        for view in blocks.views(at):
            made.update(view)
        return made.digest()


def size_behind(header: bytes, key: bytes) -> int | None:
    """Return the bytes behind a valid header of ``key``, tagged or not, of a block or a frame.

    None if the header is damaged or belongs to another key.
    """
    if len(header) != HEADER_BYTES:
        return None
    magic, _, _, size, its_key = HEAD.unpack_from(header)
    check, key_id = CHECK.unpack_from(header, HEADER_BYTES - CHECK.size)
    checked = header[: -CHECK.size] + (KEY_ID.pack(key_id) if magic == CODED_MAGIC else b"")
    is_sound = magic in (MAGIC, CODED_MAGIC) and its_key == key and check == checksum(checked)
    return size if is_sound else None


def codec_behind(header: bytes) -> tuple[int, int]:
    """Return the numbers of the codec and of the key that a valid header names; 0 for none."""
    (fields,) = _fields(as_headers([header]))
    return _codec_of(fields) if fields["magic"] == np.void(CODED_MAGIC) else (RAW, 0)


def are_coded(headers: Headers) -> Bools:
    """Return bool [n]: whether each header is that of a frame, by its first bytes."""
    found: Bools = _fields(headers)["magic"] == np.void(CODED_MAGIC)
    return found


def as_headers(headers: Sequence[bytes]) -> Headers:
    """Return uint8 [n, HEADER_BYTES] from n headers."""
    return np.frombuffer(b"".join(headers), np.uint8).reshape(-1, HEADER_BYTES)


def as_keys(keys: Sequence[BlockKey]) -> Keys:
    """Return keys as an array: V32 [n]."""
    return np.frombuffer(b"".join(keys), "V32")


def _fields(headers: Headers) -> npt.NDArray[np.void]:
    """Return the headers as records of ``FIELDS``: [n]."""
    return headers.view(FIELDS).ravel()


def _codec_of(fields: np.void) -> tuple[int, int]:
    """Return the numbers of the codec and of the key that a frame's header names."""
    return int(fields["flags"]) >> CODEC_SHIFT & BYTE, int(fields["key_id"])
