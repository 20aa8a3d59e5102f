"""Copies by address, for driver calls."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import CopyBatch, Direction

UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Many small copies by address. dst, src, size: uint64 [num_copies], contiguous, no size 0."""

    dst: UInt64s
    src: UInt64s
    size: UInt64s

    @classmethod
    def of(cls, batch: CopyBatch) -> Copies:
        """Return the copies of a batch, without empty ones."""
        dst = (batch.dst_offset + batch.dst.address).view(np.uint64)
        src = (batch.src_offset + batch.src.address).view(np.uint64)
        size = np.ascontiguousarray(batch.size).view(np.uint64)
        keep = size > 0
        return cls(dst, src, size) if keep.all() else cls(dst[keep], src[keep], size[keep])

    def host_side(self, direction: Direction) -> UInt64s:
        """Return ``src`` for a load, ``dst`` for a store."""
        return self.src if direction is Direction.LOAD else self.dst

    @property
    def mean_size(self) -> float:
        """Mean size, in bytes."""
        return float(self.size.mean())

    def pieces(self, max_copies: int) -> list[Copies]:
        """Return the copies in pieces of at most ``max_copies``."""
        if len(self) <= max_copies:
            return [self]
        starts = range(0, len(self), max_copies)
        return [self[start : start + max_copies] for start in starts]

    def cut(self, side: UInt64s, edges: UInt64s) -> Copies:
        """Return the copies, split so that none crosses an edge.

        side: ``dst`` or ``src``: the side that has the edges.
        edges: sorted addresses.
        """
        last = side + self.size - np.uint64(1)
        num_inside = np.searchsorted(edges, last, "right") - np.searchsorted(edges, side, "right")
        if not num_inside.any():
            return self
        pieces: list[tuple[int, int, int]] = []
        for dst, src, size, begin in zip(
            self.dst.tolist(), self.src.tolist(), self.size.tolist(), side.tolist(), strict=True
        ):
            inside = edges[(edges > begin) & (edges < begin + size)].tolist()
            for at, end in pairwise([begin, *inside, begin + size]):
                pieces.append((dst + at - begin, src + at - begin, end - at))
        table = np.array(pieces, np.uint64).T
        return Copies(*(np.ascontiguousarray(column) for column in table))

    def __getitem__(self, part: slice) -> Copies:
        return Copies(self.dst[part], self.src[part], self.size[part])

    def __len__(self) -> int:
        return len(self.size)
