"""Stored form of a block that a codec or a key has changed.

    magic        4   "kvC1"
    codec        1   number of the codec; 0: the bytes as they are
    flags        1   1: encrypted
    zeros        2
    plain size   8   of the block
    body size    8
    key id       4   of the key that encrypted it; 0 for none
    check        4   crc32c of the header, with zeros here
    nonce       24   zeros if it is not encrypted
    zeros        8
    body             crc32c of the block (4), zeros (4), what the codec made of it; with a lossy
                     codec the crc32c of the block as it is decoded
    tag         16   only if it is encrypted: the body is the ciphertext then

Numbers are little-endian. What is authenticated, besides the body: the header, the block's key, in
which its prefix, model, dtype and layout are, and its place: the rank of a slab.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from struct import Struct
from typing import Final

import numpy as np

from kvtier.core.hot import crc32c
from kvtier.core.types import BlockKey
from kvtier.tiers.codecs.codec import RAW, ChunkedCodec, Codec, Uint8s
from kvtier.tiers.codecs.encryption import NONCE_BYTES, TAG_BYTES, Keyring
from kvtier.tiers.crc_join import checksum, copied_crcs
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import Outcome

MAGIC: Final = b"kvC1"
HEAD: Final = Struct("<4sBBHQQII24sQ")
HEAD_BYTES: Final = HEAD.size
BODY: Final = Struct("<II")
ENCRYPTED: Final = 1
MAX_OVERHEAD: Final = HEAD_BYTES + BODY.size + TAG_BYTES
"""Most bytes of a frame beyond those of its block."""
SMOOTHING: Final = 0.1
"""Weight of a new measurement."""
NUM_TRIED: Final = 16
"""Blocks that are encoded before anything is decided."""
TRIED_AGAIN: Final = 256
"""One block in this many is encoded though it does not pay, in case its data have changed."""
LEAST_GAIN: Final = 32
"""A codec has to save at least one byte in this many."""

THERE, ABSENT, DAMAGED, _ = Outcome


@dataclass(frozen=True, slots=True)
class FrameHead:
    """Header of a frame whose check is right."""

    codec: int
    is_encrypted: bool
    plain_bytes: int
    body_bytes: int
    key_id: int
    nonce: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole frame."""
        return HEAD_BYTES + self.body_bytes + (TAG_BYTES if self.is_encrypted else 0)

    def packed(self) -> bytes:
        """Return the header's bytes."""
        flags = ENCRYPTED if self.is_encrypted else 0
        fields = (MAGIC, self.codec, flags, 0, self.plain_bytes, self.body_bytes, self.key_id)
        return HEAD.pack(*fields, checksum(HEAD.pack(*fields, 0, self.nonce, 0)), self.nonce, 0)

    @classmethod
    def read(cls, stored: Uint8s) -> FrameHead | None:
        """Return the header at the beginning of ``stored``; None if there is none."""
        if len(stored) < HEAD_BYTES:
            return None
        head = stored[:HEAD_BYTES].tobytes()
        magic, codec, flags, _, plain, body, key, _, nonce, _ = HEAD.unpack(head)
        found = cls(codec, bool(flags & ENCRYPTED), plain, body, key, nonce)
        if magic != MAGIC or body < BODY.size or found.is_encrypted != (key != 0):
            return None
        return found if found.packed() == head else None


@dataclass(slots=True)
class CodecCounts:
    """Blocks and bytes that a coder has worked on, and the processor time that it took.

    num_kept: blocks that the codec did not make smaller.
    plain_bytes, stored_bytes: of blocks that were encoded.
    """

    num_encoded: int = 0
    num_kept: int = 0
    num_decoded: int = 0
    plain_bytes: int = 0
    stored_bytes: int = 0
    decoded_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Plain bytes per stored byte; 1 if nothing was encoded."""
        return self.plain_bytes / self.stored_bytes if self.stored_bytes else 1.0


class CodecChoice:
    """Decides whether a codec pays for a store, by the costs that were measured. Thread-safe.

    A load of n bytes takes ``n * transfer`` as they are, and ``n / ratio * transfer + n * decode``
    from a codec. Until both are known the codec is used.

    counts: of the coder.
    """

    def __init__(self, counts: CodecCounts) -> None:
        self._counts = counts
        self._num_asked = 0
        self._transfer_s = 0.0  # per byte

    def note_transfer(self, num_bytes: int, seconds: float) -> None:
        """Record how long a transfer of stored bytes took, without their decoding."""
        if num_bytes <= 0:
            return
        found = max(0.0, seconds) / num_bytes
        before = self._transfer_s or found
        self._transfer_s = before + SMOOTHING * (found - before)

    @property
    def pays(self) -> bool:
        """Whether a block is loaded sooner if the codec encodes it."""
        counts, per_byte = self._counts, self._transfer_s
        if not per_byte or counts.num_encoded + counts.num_kept < NUM_TRIED:
            return True
        if not counts.num_encoded:
            return False  # nothing shrinks
        cost = counts.encode_s / counts.plain_bytes  # decoding is faster
        if counts.decoded_bytes:
            cost = counts.decode_s / counts.decoded_bytes
        return (1 - 1 / counts.ratio) * per_byte > cost

    def encodes_next(self) -> bool:
        """Return whether to encode the next block: if it pays, else now and then, to measure."""
        self._num_asked += 1
        return self.pays or self._num_asked % TRIED_AGAIN == 0


class BlockCoder:
    """Encodes blocks into their stored form, and decodes them. Thread-safe.

    block_bytes: size of every block.
    codec: codec of new blocks; None to store them as they are.
    readers: codecs of blocks that can be read.
    keyring: keys; None to neither encrypt nor decrypt.
    place: text that is authenticated with every block of an encrypted tier.
    is_auto: encode only while that makes loads faster, see ``CodecChoice``.
    is_framing: make a frame of every block, also if nothing changes it.
    """

    def __init__(
        self,
        block_bytes: int,
        codec: Codec | None = None,
        readers: tuple[Codec, ...] = (),
        keyring: Keyring | None = None,
        place: str = "",
        is_auto: bool = False,
        is_framing: bool = False,
    ) -> None:
        self.block_bytes = block_bytes
        self.counts = CodecCounts()
        self.choice = CodecChoice(self.counts)
        self._is_auto = is_auto
        self._is_framing = is_framing
        self._codec = codec
        self._codecs = {each.number: each for each in (*readers, *([codec] if codec else []))}
        self._keyring = keyring
        self._place = place.encode()
        self._own = threading.local()

    @property
    def changes_blocks(self) -> bool:
        """Whether blocks are stored in another form than their own."""
        return self._codec is not None or self._keyring is not None

    @property
    def is_compressing(self) -> bool:
        return self._codec is not None

    @property
    def is_encrypting(self) -> bool:
        return self._keyring is not None

    @property
    def most_bytes(self) -> int:
        """Most bytes of a frame."""
        return self.block_bytes + MAX_OVERHEAD

    def can_read(self, codec: int, key_id: int) -> bool:
        """Return whether frames of this codec and key can be decoded.

        A coder with keys accepts no frame without one: anybody may have written it.

        codec: number of the codec.
        key_id: 0 for a frame that is not encrypted.
        """
        has_key = not key_id if self._keyring is None else self._keyring.has(key_id)
        return has_key and (codec == RAW or codec in self._codecs)

    # -- encoding ----------------------------------------------------------------------------------

    def encode(self, key: BlockKey, block: Pieces, into: Uint8s) -> FrameHead | None:
        """Write the frame of a block. Return its header; None to store the block as it is.

        A block is stored as it is if the codec does not shrink it and nothing is encrypted, unless
        every block is framed.

        block: one block in host memory.
        into: uint8 [``most_bytes``] at least.
        """
        began = time.thread_time()
        body = self._scratch("body", self.most_bytes) if self._keyring else into[HEAD_BYTES:]
        codec, num, crc = RAW, None, 0
        if self._codec is not None and (not self._is_auto or self.choice.encodes_next()):
            room = BODY.size + self.block_bytes - self.block_bytes // LEAST_GAIN
            codec, (num, crc) = self._codec.number, self._encoded(block, body[BODY.size : room])
            self.counts.num_kept += num is None
        if num is None:
            if self._keyring is None and not self._is_framing:
                self.counts.encode_s += time.thread_time() - began
                return None
            codec, num = RAW, self.block_bytes
            crc = self._gather(block, body[BODY.size : BODY.size + num])
        BODY.pack_into(body.data, 0, crc, 0)
        head = self._sealed(key, codec, body[: BODY.size + num], into)
        self.counts.num_encoded += 1
        self.counts.plain_bytes += self.block_bytes
        self.counts.stored_bytes += head.num_bytes
        self.counts.encode_s += time.thread_time() - began
        return head

    def _encoded(self, block: Pieces, into: Uint8s) -> tuple[int | None, int]:
        """Encode a block. Return the bytes written, or None, and the checksum of its bytes."""
        codec = self._codec
        assert codec is not None
        if isinstance(codec, ChunkedCodec) and len(block.sizes) == 1:
            copy, crc = self._scratch("chunk", codec.chunk_bytes), 0

            def copied(chunk: Uint8s) -> Uint8s:
                nonlocal crc
                there = copy[: len(chunk)]
                there[:] = chunk
                crc = crc32c(there.ctypes.data, len(there), crc)
                return there

            num = codec.encode_chunks(np.frombuffer(block.views(0)[0], np.uint8), into, copied)
            return num, crc
        plain = self._scratch("plain", self.block_bytes)
        crc = self._gather(block, plain)
        num = codec.encode(plain, into)
        if num is not None and codec.is_lossy:
            is_decoded = codec.decode(into[:num], plain)
            assert is_decoded, "a codec decodes what it has encoded"
            crc = checksum(plain)
        return num, crc

    def _gather(self, block: Pieces, plain: Uint8s) -> int:
        """Copy the block's bytes to ``plain``, and return their checksum.

        They are copied in any case: so a source that is modified meanwhile, against the rules, has
        the checksum of its copy.
        """
        whole = Pieces.whole([plain.ctypes.data], self.block_bytes)
        return int(copied_crcs(whole.cut(block.sizes), block)[0])

    def _sealed(self, key: BlockKey, codec: int, body: Uint8s, into: Uint8s) -> FrameHead:
        """Write header, body and tag to ``into``; without encryption the body is there already."""
        ring = self._keyring
        if ring is None:
            head = FrameHead(codec, False, self.block_bytes, len(body), 0, bytes(NONCE_BYTES))
            into[:HEAD_BYTES] = np.frombuffer(head.packed(), np.uint8)
            return head
        nonce = os.urandom(NONCE_BYTES)
        head = FrameHead(codec, True, self.block_bytes, len(body), ring.current, nonce)
        packed = head.packed()
        into[:HEAD_BYTES] = np.frombuffer(packed, np.uint8)
        room = into.data[HEAD_BYTES : head.num_bytes]
        ring.seal(nonce, self._known(packed, key), body.data, room)
        return head

    def _known(self, head: bytes, key: BlockKey) -> bytes:
        """Return what is authenticated besides the body."""
        return head + key + self._place

    # -- decoding ----------------------------------------------------------------------------------

    def decode(self, key: BlockKey, stored: Uint8s, block: Pieces) -> Outcome:
        """Decode a frame into the memory of its block, and verify it.

        The memory is unchanged unless the frame, with its codec and its key, can be this block's.

        stored: uint8 [n], C-contiguous; bytes after the frame are ignored.
        block: one block in host memory.

        Returns ``THERE``, ``DAMAGED``, or ``ABSENT`` for a codec or a key that is not known here.
        """
        began = time.thread_time()
        head = FrameHead.read(stored)
        if head is None or head.plain_bytes != self.block_bytes or head.num_bytes > len(stored):
            return DAMAGED
        if not self.can_read(head.codec, head.key_id):
            return ABSENT
        body = self._opened(key, head, stored)
        if body is None:
            return DAMAGED
        crc, zeros = BODY.unpack_from(body.data)
        if zeros:
            return DAMAGED
        found = self._decoded(head.codec, body[BODY.size :], block)
        if found is None:
            return DAMAGED
        is_right = found == crc
        self.counts.num_decoded += 1
        self.counts.decoded_bytes += self.block_bytes
        self.counts.decode_s += time.thread_time() - began
        return THERE if is_right else DAMAGED

    def _opened(self, key: BlockKey, head: FrameHead, stored: Uint8s) -> Uint8s | None:
        """Return the body, decrypted; None if it is not authentic."""
        sealed = stored[HEAD_BYTES : head.num_bytes]
        if self._keyring is None:
            return sealed
        if head.body_bytes > self.most_bytes:
            return None
        body = self._scratch("body", self.most_bytes)[: head.body_bytes]
        known = self._known(head.packed(), key)
        is_ours = self._keyring.open(head.key_id, head.nonce, known, sealed.data, body.data)
        return body if is_ours else None

    def _decoded(self, codec: int, body: Uint8s, block: Pieces) -> int | None:
        """Write the block's bytes to its memory, and return their checksum.

        None if the codec can't decode the body. A block in one piece is decoded where it belongs.
        """
        if codec == RAW and len(body) != self.block_bytes:
            return None
        plain = body
        if codec != RAW:
            is_whole = len(block.sizes) == 1
            plain = (
                np.frombuffer(block.views(0)[0], np.uint8)
                if is_whole
                else self._scratch("plain", self.block_bytes)
            )
            if not self._codecs[codec].decode(body, plain):
                return None
            if is_whole:
                return checksum(plain)
        whole = Pieces.whole([plain.ctypes.data], self.block_bytes)
        return int(copied_crcs(block, whole.cut(block.sizes))[0])

    # -- memory ------------------------------------------------------------------------------------

    def _scratch(self, name: str, num_bytes: int) -> Uint8s:
        """Return memory of this thread for a call."""
        found: Uint8s | None = getattr(self._own, name, None)
        if found is None:
            found = np.empty(num_bytes, np.uint8)
            setattr(self._own, name, found)
        return found

    def buffer(self) -> Uint8s:
        """Return memory of this thread for one frame, until its next call."""
        return self._scratch("frame", self.most_bytes)
