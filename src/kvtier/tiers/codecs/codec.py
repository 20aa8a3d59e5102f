"""Interface of codecs: blocks to fewer bytes, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from kvtier.layout import KVGroup

Uint8s = npt.NDArray[np.uint8]

RAW: Final = 0
"""Number of blocks that no codec has changed."""
FIRST_PLUGIN: Final = 64
"""First number of codecs that are not kvtier's own."""
LAST_NUMBER: Final = 255


class Codec(ABC):
    """Codec of blocks. Thread-safe.

    A plug-in of ``kvtier.codecs`` is a class without arguments.

    number: 1 to 255, stored with every block, so it never changes. Numbers below 64 are kvtier's.
    is_lossy: whether blocks come back changed. Such blocks have other keys than exact ones, and are
        used only by an engine that asked for this codec.

    The caller guarantees
        arrays are C-contiguous, and nobody else writes to them during a call. ``decode`` gets as
        much memory as the block has that was encoded.
    The implementer provides
        ``decode`` of what ``encode`` wrote gives the same bytes, in every process and version. A
        lossy codec gives other bytes than it got, but always the same ones.
        Memory that a call needs is bounded by the size of the block, whatever ``stored`` says.
    Outcomes and errors
        no method raises for its data: ``encode`` returns None, and ``decode`` returns False. The
        constructor raises ``ConfigError`` if a library is missing.
    """

    number: ClassVar[int]
    is_lossy: ClassVar[bool] = False

    def fit(self, group: KVGroup) -> Codec:
        """Return the codec of blocks of this shape; itself if the shape does not matter.

        Raises ``ConfigError`` for a shape that it can't encode.

        group: shape of the blocks, whose bytes are in the ``block_first`` layout.
        """
        del group
        return self

    @abstractmethod
    def encode(self, block: Uint8s, into: Uint8s) -> int | None:
        """Encode a block. Return the number of bytes written; None if ``into`` has no room.

        block: uint8 [num_bytes].
        into: uint8 [room].
        """

    @abstractmethod
    def decode(self, stored: Uint8s, into: Uint8s) -> bool:
        """Decode what ``encode`` wrote, and return whether it was that.

        The content of ``into`` is undefined after False. Damage that is not noticed is found by the
        caller's checksum.

        stored: uint8 [num_stored].
        into: uint8 [num_bytes], the block.
        """


class ChunkedCodec(Codec):
    """Codec that encodes each chunk of a block by itself, one behind the other.

    A caller that copies the block and computes its checksum does so chunk by chunk: the bytes are
    in the processor's cache when they are encoded.

    chunk_bytes: bytes of a chunk; the last one may be shorter.
    """

    chunk_bytes: ClassVar[int]

    @abstractmethod
    def encode_chunk(self, chunk: Uint8s, into: Uint8s) -> int | None:
        """Encode a chunk. Return the number of bytes written; None if ``into`` has no room."""

    @abstractmethod
    def decode_chunk(self, stored: Uint8s, into: Uint8s) -> int | None:
        """Decode the chunk at the beginning of ``stored``.

        Return the bytes that it takes there; None if there is no chunk of this size.
        """

    def encode(self, block: Uint8s, into: Uint8s) -> int | None:
        return self.encode_chunks(block, into, lambda chunk: chunk)

    def encode_chunks(
        self, block: Uint8s, into: Uint8s, visit: Callable[[Uint8s], Uint8s]
    ) -> int | None:
        """Encode a block, of which ``visit`` returns the bytes of each chunk to encode."""
        used = 0
        for first in range(0, len(block), self.chunk_bytes):
            num = self.encode_chunk(visit(block[first : first + self.chunk_bytes]), into[used:])
            if num is None:
                return None
            used += num
        return used

    def decode(self, stored: Uint8s, into: Uint8s) -> bool:
        used = 0
        for first in range(0, len(into), self.chunk_bytes):
            num = self.decode_chunk(stored[used:], into[first : first + self.chunk_bytes])
            if num is None:
                return False
            used += num
        return used == len(stored)
