"""Memory locations of blocks, which storage tiers read into and write from."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

HOST_KINDS: Final = frozenset({"host", "cpu"})
"""Kinds of memory that the processor and the kernel can read and write."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Scatter-gather list: blocks in memory, each in the same number of pieces.

    The pieces are in the order of the block's bytes in the ``block_first`` layout, whatever the
    layout in memory. So a block has the same bytes in storage, whichever engine stored it.

    addresses: uint64 [num_blocks, num_pieces], start of each piece; 0 for a piece that is not
        requested. Only a disk accepts such blocks. It reads the piece anyway, because the checksum
        covers the whole block.
    sizes: int64 [num_pieces], bytes of each piece.
    kind: kind of memory, "host" or a device's name.
    """

    addresses: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.int64]
    kind: str = "host"

    @classmethod
    def whole(cls, addresses: npt.ArrayLike, num_bytes: int, kind: str = "host") -> Pieces:
        """Return blocks of one piece each. addresses: [num_blocks]."""
        begins = np.asarray(addresses, np.uint64).reshape(-1, 1)
        return cls(begins, np.array([num_bytes], np.int64), kind)

    def __len__(self) -> int:
        return len(self.addresses)

    def pick(self, at: npt.NDArray[np.int64] | list[int] | slice) -> Pieces:
        """Return the pieces of some of the blocks."""
        return Pieces(self.addresses[at], self.sizes, self.kind)

    def cut(self, sizes: npt.NDArray[np.int64]) -> Pieces:
        """Return the same blocks, of one piece each, cut into pieces of ``sizes`` bytes."""
        assert len(self.sizes) == 1, "they lie in one piece each"
        shifts = (np.cumsum(sizes) - sizes).astype(np.uint64)
        return Pieces(self.addresses + shifts, sizes, self.kind)

    def gather(self, offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Pieces:
        """Return parts of the same blocks: all first parts, then all second ones, and so on.

        offsets: int64 [num_parts, num_pieces], where the pieces of each part begin in a block. None
        of them lies in two pieces of the block.
        sizes: int64 [num_pieces].
        """
        ends = np.cumsum(self.sizes)
        inside = np.searchsorted(ends, offsets, "right")
        assert (offsets + sizes <= ends[inside]).all(), "a part lies in two pieces of its block"
        within = (offsets - (ends - self.sizes)[inside]).astype(np.uint64)
        begins = self.addresses[:, inside].swapaxes(0, 1) + within[:, None]
        return Pieces(begins.reshape(-1, len(sizes)), sizes, self.kind)

    def behind(self, headers: npt.NDArray[np.uint8]) -> Pieces:
        """Return the same blocks with one more piece in front of each, its header.

        headers: uint8 [num_blocks, num_bytes], C-contiguous; the caller keeps them alive.
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
        """Bool [num_blocks, num_pieces]: which pieces are requested."""
        return np.asarray(self.addresses != 0)

    @property
    def is_host(self) -> bool:
        """Whether the CPU can read and write the memory."""
        return self.kind in HOST_KINDS

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return int(self.sizes.sum())

    # -- for tiers that move one block at a time ---------------------------------------------------

    def views(self, at: int) -> list[memoryview]:
        """Return writable views of the pieces of one block; host memory only."""
        assert self.wanted[at].all(), "a block in part, which only a disk reads"
        places = zip(self.addresses[at].tolist(), self.sizes.tolist(), strict=True)
        return [
            memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            for address, size in places
        ]

    def read(self, at: int) -> bytes:
        """Return a copy of the bytes of one block; host memory only."""
        return b"".join(self.views(at))

    def write(self, at: int, content: bytes | bytearray | memoryview) -> None:
        """Copy ``content`` into the pieces of one block; host memory only."""
        assert len(content) == self.block_bytes, "not the bytes of one block"
        begin = 0
        for view in self.views(at):
            view[:] = content[begin : begin + len(view)]
            begin += len(view)
