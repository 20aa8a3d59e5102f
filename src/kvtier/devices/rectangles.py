"""Find rectangles in a list of copies: one 2-D copy replaces many small ones.

A block that is contiguous in host memory and split into layers on the device is one rectangle per
part: a row per layer, with a whole layer as the pitch on the device. If K and V alternate, the rows
of a rectangle are every second copy, so several distances between rows are tried.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.devices.copies import Copies
from kvtier.devices.driver import CopyRows

Int64s = npt.NDArray[np.int64]

MAX_PARTS = 4
"""Maximum number of alternating parts of a block: K and V, or latent, rotary key and an index."""
MAX_PITCH = (1 << 31) - 1
"""Maximum number of bytes between two rows: CUDA's limit."""
WORTH = 2
"""Rectangles are used if the copies outnumber them at least by this factor."""


def rectangles(copies: Copies) -> CopyRows | None:
    """Return the copies as rectangles; None if that reduces their number too little."""
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
