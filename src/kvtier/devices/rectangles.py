"""Find rectangles in a list of copies: one 2-D copy does what many small ones would.

A block that is contiguous in host memory and cut into layers on the device is one rectangle per
part: a row per layer, the pitch on the device a whole layer. Where K and V take turns, the rows of
a rectangle are every second copy, so several distances between its rows are tried.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.devices.copies import Copies
from kvtier.devices.driver import CopyRows

Int64s = npt.NDArray[np.int64]

MAX_PARTS = 4
"""Parts of a block that may take turns: K and V, or latent, rotary key and an index."""
MAX_PITCH = (1 << 31) - 1
"""Bytes between two rows, at most: CUDA's limit."""
WORTH = 2
"""Rectangles are used where there are so many times fewer of them than of copies."""


def rectangles(copies: Copies) -> CopyRows | None:
    """The same copies as rectangles; None where these are hardly fewer."""
    if len(copies) < WORTH:
        return None
    found = min((_interleaved(copies, num_parts) for num_parts in range(1, MAX_PARTS + 1)), key=len)
    return found if len(found) * WORTH <= len(copies) else None


def _interleaved(copies: Copies, num_parts: int) -> CopyRows:
    """Rectangles whose rows are every ``num_parts``-th copy."""
    count = len(copies)
    order = np.concatenate([np.arange(part, count, num_parts) for part in range(num_parts)])
    dst, src, size = (each[order].view(np.int64) for each in (copies.dst, copies.src, copies.size))
    to, at = np.diff(dst), np.diff(src)
    fits = (size[1:] == size[:-1]) & (to >= size[1:]) & (at >= size[1:])
    fits &= (to <= MAX_PITCH) & (at <= MAX_PITCH)
    first, height = _runs(to, at, fits)
    pitched = height > 1
    step = np.minimum(first, count - 2)  # the last copy has no step, and needs no pitch
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
    """First copy and number of copies of each run of equal steps, and of what is in no run."""
    count = len(to) + 1
    goes_on = fits[1:] & fits[:-1] & (to[1:] == to[:-1]) & (at[1:] == at[:-1])
    begins = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    first: list[int] = []
    height: list[int] = []
    done = 0  # copies before this one have a place
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), count - 1], strict=True):
        # The steps begin .. end - 1 are equal: a run of the copies begin .. end, without the one
        # that the run before has taken.
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
