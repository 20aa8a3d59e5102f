"""Codec ``lossless``: floating-point numbers by byte planes, exponents by Huffman codes.

A block is encoded in chunks of ``CHUNK_BYTES``, each by itself, behind a header.

    width        1   bytes of an element: 1, 2 or 4; 0: the chunk follows as it is
    base         2   signed; see below
    zeros        1
    num_escapes  4
    num_high     4   bytes of the compressed exponents
    low              the bytes of the elements without their exponents
    escapes          exponents that do not fit into four bits
    high             the exponents, a zstd frame

For the planes, ``base`` and the escapes see ``native/planes/planes.hpp``. Sign and mantissa of KV
look random, so they are stored as they are. Exponents take about three bits. Two of them are packed
into one byte if they fit, which halves the work of the entropy coder.

Source: byte planes are those of ZipNN (arXiv:2411.05239).
"""

from __future__ import annotations

import threading
from struct import Struct
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.core.errors import ConfigError, install_command
from kvtier.core.hot import choose_planes, join_planes, split_planes
from kvtier.tiers.codecs.codec import ChunkedCodec, Uint8s

if TYPE_CHECKING:
    from zstandard import ZstdCompressor, ZstdDecompressor

CHUNK_BYTES: Final = 256 << 10
"""A chunk and its planes stay in the second-level cache."""
HEADER: Final = Struct("<BhBII")
WHOLE: Final = -1
"""Base of exponents that are not packed in pairs."""
MAX_BASE: Final = 241
ESCAPE_SHARE: Final = 16
"""At most one in this many elements has an exponent that does not fit; else none is packed."""
WINDOW_LOG: Final = 18
"""Logarithm of ``CHUNK_BYTES``: no frame needs more memory."""
ZSTD_FAST: Final = 1


class Lossless(ChunkedCodec):
    """Byte planes, with exponents by the Huffman coder of zstd.

    The element type is found per chunk, by a sample of its bytes.
    """

    number = 1
    chunk_bytes = CHUNK_BYTES

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ConfigError(
                "codec: lossless needs the package zstandard; install it: "
                f"{install_command('codecs')}"
            ) from error
        self._error = zstandard.ZstdError
        self._content_size = zstandard.frame_content_size
        # Matches are never worth their search in exponents: a tiny table, and long matches only.
        self._parameters = zstandard.ZstdCompressionParameters(
            compression_level=1,
            strategy=ZSTD_FAST,
            window_log=WINDOW_LOG,
            hash_log=6,
            min_match=7,
            target_length=0,
        )
        self._new_compressor = zstandard.ZstdCompressor
        self._new_decompressor = zstandard.ZstdDecompressor
        self._own = threading.local()

    def encode_chunk(self, chunk: Uint8s, into: Uint8s) -> int | None:
        num_bytes, begin = len(chunk), HEADER.size
        width, base = choose_planes(chunk.ctypes.data, num_bytes)
        if width and num_bytes % (2 * width) == 0:
            num = self._encode_planes(chunk, into, width, base)
            if num is not None and num < begin + num_bytes:
                return num
        if len(into) < begin + num_bytes:
            return None
        HEADER.pack_into(into.data, 0, 0, 0, 0, 0, 0)
        into[begin : begin + num_bytes] = chunk
        return begin + num_bytes

    def _encode_planes(self, chunk: Uint8s, into: Uint8s, width: int, base: int) -> int | None:
        num_bytes, low = len(chunk), HEADER.size
        num_elements = num_bytes // width
        most = num_elements // ESCAPE_SHARE
        escapes = low + _low_bytes(num_bytes, width)
        if len(into) < escapes + most:
            return None
        high = self._high()

        def split() -> int:
            address = into.ctypes.data
            return split_planes(
                chunk.ctypes.data,
                num_bytes,
                width,
                base,
                high.ctypes.data,
                address + low,
                address + escapes,
                most,
            )

        num_escapes = split()
        if num_escapes < 0:
            base = WHOLE
            num_escapes = split()
        num_high = _high_bytes(num_bytes, width, base)
        packed = self._compressor().compress(high[:num_high].data)
        begin = escapes + num_escapes
        end = begin + len(packed)
        if len(into) < end:
            return None
        into[begin:end] = np.frombuffer(packed, np.uint8)
        HEADER.pack_into(into.data, 0, width, base, 0, num_escapes, len(packed))
        return end

    def decode_chunk(self, stored: Uint8s, into: Uint8s) -> int | None:
        num_bytes, begin = len(into), HEADER.size
        if len(stored) < begin:
            return None
        width, base, zeros, num_escapes, num_packed = HEADER.unpack_from(stored.data)
        if not width:
            end = begin + num_bytes
            if (base, zeros, num_escapes, num_packed) != (0, 0, 0, 0) or len(stored) < end:
                return None
            into[:] = stored[begin:end]
            return end
        if not _is_possible(num_bytes, width, base) or zeros:
            return None
        escapes = begin + _low_bytes(num_bytes, width)
        packed = escapes + num_escapes
        end = packed + num_packed
        if len(stored) < end:
            return None
        num_high = _high_bytes(num_bytes, width, base)
        high = self._decompress(stored[packed:end], num_high)
        if high is None:
            return None
        address = stored.ctypes.data
        is_whole = join_planes(
            into.ctypes.data,
            num_bytes,
            width,
            base,
            high.ctypes.data,
            address + begin,
            address + escapes,
            num_escapes,
        )
        return end if is_whole else None

    def _decompress(self, packed: Uint8s, num_bytes: int) -> Uint8s | None:
        """Return ``num_bytes`` bytes that a frame holds; None if it is another one."""
        try:
            if self._content_size(packed.data) != num_bytes:  # before memory is allocated for it
                return None
            found = self._decompressor().decompress(packed.data, allow_extra_data=False)
        except self._error:
            return None
        return np.frombuffer(found, np.uint8) if len(found) == num_bytes else None

    # -- of each thread ----------------------------------------------------------------------------

    def _high(self) -> Uint8s:
        if not hasattr(self._own, "high"):
            self._own.high = np.empty(CHUNK_BYTES, np.uint8)
        found: Uint8s = self._own.high
        return found

    def _compressor(self) -> ZstdCompressor:
        if not hasattr(self._own, "compressor"):
            self._own.compressor = self._new_compressor(compression_params=self._parameters)
        found: ZstdCompressor = self._own.compressor
        return found

    def _decompressor(self) -> ZstdDecompressor:
        if not hasattr(self._own, "decompressor"):
            self._own.decompressor = self._new_decompressor(max_window_size=1 << WINDOW_LOG)
        found: ZstdDecompressor = self._own.decompressor
        return found


def _is_possible(num_bytes: int, width: int, base: int) -> bool:
    if width not in (1, 2, 4) or num_bytes % (2 * width):
        return False
    return base == 0 if width == 1 else WHOLE <= base <= MAX_BASE


def _low_bytes(num_bytes: int, width: int) -> int:
    return num_bytes // 2 if width == 1 else num_bytes // width * (width - 1)


def _high_bytes(num_bytes: int, width: int, base: int) -> int:
    return num_bytes // width // (1 if base == WHOLE else 2)
