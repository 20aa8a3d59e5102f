"""Make a batch smaller: merge neighbours, cap the number of copies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvtier.devices.base import CopyBatch, Int64s

MAX_COPIES = 4096
"""Copies per submission. Ascend's driver refuses more, HIP and CUDA have faulted far above it."""


NO_SEAMS = np.empty(0, np.int64)


def coalesce(
    batch: CopyBatch, src_seams: Int64s = NO_SEAMS, dst_seams: Int64s = NO_SEAMS
) -> CopyBatch:
    """Merge copies that are adjacent on both sides, in the order given; drop empty ones.

    No driver merges them, and small copies cost more than their bytes. Nothing is merged across a
    seam (see ``MemoryTier``): a driver refuses a copy that runs over two registrations.
    """
    keep = batch.size > 0
    src, dst, size = batch.src_offset[keep], batch.dst_offset[keep], batch.size[keep]
    if len(size) < 2:
        return CopyBatch(batch.src, batch.dst, src, dst, size)
    starts_run = np.empty(len(size), bool)
    starts_run[0] = True
    np.not_equal(src[:-1] + size[:-1], src[1:], out=starts_run[1:])
    starts_run[1:] |= dst[:-1] + size[:-1] != dst[1:]
    for offsets, seams in ((src, src_seams), (dst, dst_seams)):
        if len(seams):
            starts_run |= np.isin(offsets, seams)
    first = np.flatnonzero(starts_run)
    merged = np.add.reduceat(size, first)
    return CopyBatch(batch.src, batch.dst, src[first], dst[first], merged, batch.num_bytes)


def split(batch: CopyBatch, max_copies: int = MAX_COPIES) -> Iterator[CopyBatch]:
    """Yield the copies in batches of at most ``max_copies``."""
    for start in range(0, len(batch.size), max_copies):
        piece = slice(start, start + max_copies)
        yield CopyBatch(
            batch.src,
            batch.dst,
            batch.src_offset[piece],
            batch.dst_offset[piece],
            batch.size[piece],
        )
