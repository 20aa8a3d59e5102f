"""Locations of blocks' bytes, which storage tiers read into and write from."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

HOST_KINDS: Final = frozenset({"host", "cpu"})
"""Kinds of memory that the processor and the kernel can read and write."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Blocks in memory, each in the same number of pieces, in the order of its bytes.

    addresses: uint64 [num_blocks, num_pieces], where each piece begins; 0 for one that nobody
    wants, which a disk reads all the same, for its checksum is that of the block, and nobody else
    is asked for. sizes: int64 [num_pieces], bytes of each. kind: of the memory, "host" or a
    device's name.

    The bytes of a block are those of the ``block_first`` layout, whatever the layout that they lie
    in: so a block is the same in storage whoever has stored it.
    """

    addresses: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.int64]
    kind: str = "host"

    @classmethod
    def whole(cls, addresses: npt.ArrayLike, num_bytes: int, kind: str = "host") -> Pieces:
        """Blocks that lie in one piece each. addresses: [num_blocks]."""
        begins = np.asarray(addresses, np.uint64).reshape(-1, 1)
        return cls(begins, np.array([num_bytes], np.int64), kind)

    def __len__(self) -> int:
        return len(self.addresses)

    def pick(self, at: npt.NDArray[np.int64] | list[int] | slice) -> Pieces:
        """Return the pieces of some of the blocks."""
        return Pieces(self.addresses[at], self.sizes, self.kind)

    def cut(self, sizes: npt.NDArray[np.int64]) -> Pieces:
        """The same blocks, which lie in one piece each, in pieces of so many bytes."""
        assert len(self.sizes) == 1, "they lie in one piece each"
        shifts = (np.cumsum(sizes) - sizes).astype(np.uint64)
        return Pieces(self.addresses + shifts, sizes, self.kind)

    def behind(self, headers: npt.NDArray[np.uint8]) -> Pieces:
        """The same blocks, each behind its header, which is a piece more.

        headers: uint8 [num_blocks, num_bytes], C-contiguous; the caller keeps them.
        """
        num_bytes = headers.shape[1]
        begins = headers.ctypes.data + num_bytes * np.arange(len(self), dtype=np.uint64)
        addresses = np.column_stack((begins.astype(np.uint64), self.addresses))
        return Pieces(addresses, np.concatenate(([num_bytes], self.sizes)), self.kind)

    def part(self, first: int, num_bytes: int) -> Pieces:
        """Return ``num_bytes`` bytes of each block, from byte ``first`` on."""
        ends = np.cumsum(self.sizes)
        begins = ends - self.sizes
        low = np.maximum(begins, first)
        size = np.minimum(ends, first + num_bytes) - low
        some = np.flatnonzero(size > 0)
        shift = (low - begins)[some].astype(np.uint64) * self.wanted[:, some]
        return Pieces(self.addresses[:, some] + shift, size[some], self.kind)

    @property
    def wanted(self) -> npt.NDArray[np.bool_]:
        """Bool [num_blocks, num_pieces]: which pieces somebody wants."""
        return np.asarray(self.addresses != 0)

    @property
    def is_host(self) -> bool:
        """Whether the processor can read and write them."""
        return self.kind in HOST_KINDS

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return int(self.sizes.sum())

    # -- for tiers that move block after block -----------------------------------------------------

    def views(self, at: int) -> list[memoryview]:
        """The pieces of one block, to be read and written; host memory only."""
        return [
            memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            for address, size in self._pieces_of(at)
        ]

    def read(self, at: int) -> bytes:
        """A copy of one block's bytes; host memory only."""
        return b"".join(ctypes.string_at(address, size) for address, size in self._pieces_of(at))

    def write(self, at: int, content: bytes | bytearray | memoryview) -> None:
        """Put the bytes of one block where they belong; host memory only."""
        assert len(content) == self.block_bytes, "not the bytes of one block"
        begin = 0
        for address, size in self._pieces_of(at):
            ctypes.memmove(address, bytes(content[begin : begin + size]), size)
            begin += size

    def _pieces_of(self, at: int) -> Iterator[tuple[int, int]]:
        assert self.wanted[at].all(), "a block in part, which only a disk reads"
        return zip(self.addresses[at].tolist(), self.sizes.tolist(), strict=True)
