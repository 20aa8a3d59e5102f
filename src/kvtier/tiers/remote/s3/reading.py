"""Parts of a pack: which ones to ask for, and the memory that they come in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvtier.tiers.remote.s3.packs import Int64s, PackShape

GAP_BYTES: Final = 1 << 20
"""So much is read in vain rather than asking twice: a request costs as much as some MB."""
PART_BYTES: Final = 32 << 20
"""About the most that is asked for in one request: several connections are faster than one. A pack
of the usual size is one part, with its header: more requests cost servers more."""
KEPT_BYTES: Final = (32 << 20) - (64 << 10)
"""The largest piece that glibc's malloc ever keeps, nearly."""


@dataclass(frozen=True, slots=True)
class PackPart:
    """One request: bytes ``start`` to ``end`` of a pack.

    The part that begins at 0 has the header. wanted: the wanted blocks that lie entirely in it.
    """

    start: int
    end: int
    wanted: slice


def parts_of(
    shape: PackShape, num_blocks: int, wanted: Int64s, with_header: bool
) -> list[PackPart]:
    """Parts of a pack of ``num_blocks``, ascending. wanted: int64 [n], numbers of blocks in it,
    ascending, one at least. with_header: it has a part of its own, or stands at the beginning of
    the first."""
    begins = shape.offsets(num_blocks, wanted)
    ends = begins + shape.block_bytes
    gaps = np.append(np.flatnonzero(begins[1:] - ends[:-1] > GAP_BYTES) + 1, len(wanted))
    parts, first = [], 0
    while first < len(wanted):
        full = int(np.searchsorted(ends, begins[first] + PART_BYTES, "right"))
        last = min(max(full, first + 1), int(gaps[np.searchsorted(gaps, first, "right")]))
        parts.append(PackPart(int(begins[first]), int(ends[last - 1]), slice(first, last)))
        first = last
    if with_header:
        header_bytes = shape.header_bytes(num_blocks)
        if parts[0].start - header_bytes > GAP_BYTES:
            return [PackPart(0, header_bytes, slice(0)), *parts]
        parts[0] = replace(parts[0], start=0)
    return parts


def keep_freed_memory() -> None:
    """Have malloc keep the memory of an answer for the next one.

    glibc's gives larger pieces back to the kernel than the process has freed so far, and fresh
    pages cost more than the bytes that come in them. Here a piece is freed that is as large as it
    ever keeps, which a process that has loaded a model has done anyway. See M_MMAP_THRESHOLD in
    mallopt(3).
    """
    np.empty(KEPT_BYTES, np.uint8)
