"""Copies by address, for driver calls: one by one, or as rectangles of a 2-D copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import CopyBatch, Direction, Int64s

UInt64s = npt.NDArray[np.uint64]

MAX_PARTS = 4
"""Maximum number of alternating parts of a block: K and V, or latent, rotary key and an index."""
MAX_PITCH = (1 << 31) - 1
"""Maximum number of bytes between two rows: CUDA's limit."""
WORTH = 2
"""Rectangles are used if the copies outnumber them at least by this factor."""


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


@dataclass(frozen=True, slots=True, eq=False)
class CopyRows:
    """Rectangles of a 2-D copy.

    Row r of rectangle i goes from ``src[i] + r * src_pitch[i]`` to ``dst[i] + r * dst_pitch[i]``.
    All int64 [num_rectangles], bytes; height in rows.
    """

    dst: Int64s
    src: Int64s
    dst_pitch: Int64s
    src_pitch: Int64s
    width: Int64s
    height: Int64s

    def each(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Yield, per rectangle: dst, src, dst_pitch, src_pitch, width, height."""
        columns = (self.dst, self.src, self.dst_pitch, self.src_pitch, self.width, self.height)
        return zip(*(column.tolist() for column in columns), strict=True)

    def __len__(self) -> int:
        return len(self.width)


def rectangles(copies: Copies) -> CopyRows | None:
    """Return the copies as rectangles; None if that reduces their number too little.

    A block that is contiguous in host memory and split into layers on the device is one rectangle
    per part: a row per layer, with a whole layer as the pitch on the device. If K and V alternate,
    the rows of a rectangle are every second copy, so several distances between rows are tried.
    """
    if len(copies) < WORTH:
        return None
    found = min((_interleaved(copies, num_parts) for num_parts in range(1, MAX_PARTS + 1)), key=len)
    return found if len(found) * WORTH <= len(copies) else None


def _interleaved(copies: Copies, num_parts: int) -> CopyRows:
    """Return the rectangles whose rows are every ``num_parts``-th copy."""
    count = len(copies)
    order = np.concatenate([np.arange(part, count, num_parts) for part in range(num_parts)])
    dst, src, size = (each[order].view(np.int64) for each in (copies.dst, copies.src, copies.size))
    to, at = np.diff(dst), np.diff(src)
    fits = (size[1:] == size[:-1]) & (to >= size[1:]) & (at >= size[1:])
    fits &= (to <= MAX_PITCH) & (at <= MAX_PITCH)
    first, height = _runs(to, at, fits)
    pitched = height > 1
    step = np.minimum(first, count - 2)  # the last copy has no step and needs no pitch
    width = size[first]
    return CopyRows(
        dst=dst[first],
        src=src[first],
        dst_pitch=np.where(pitched, to[step], width),
        src_pitch=np.where(pitched, at[step], width),
        width=width,
        height=height,
    )


def _runs(to: Int64s, at: Int64s, fits: npt.NDArray[np.bool_]) -> tuple[Int64s, Int64s]:
    """Return first copy and length of each run of equal steps; other copies are runs of 1."""
    count = len(to) + 1
    goes_on = fits[1:] & fits[:-1] & (to[1:] == to[:-1]) & (at[1:] == at[:-1])
    begins = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    first: list[int] = []
    height: list[int] = []
    done = 0  # copies before this one are in a run
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), count - 1], strict=True):
        # The steps begin .. end - 1 are equal: a run of the copies begin .. end, without a copy
        # that belongs to the previous run.
        if not fits[begin] or (begin := max(begin, done)) >= end:
            continue
        first += range(done, begin)
        height += [1] * (begin - done)
        first.append(begin)
        height.append(end + 1 - begin)
        done = end + 1
    first += range(done, count)
    height += [1] * (count - done)
    return np.array(first, np.int64), np.array(height, np.int64)
