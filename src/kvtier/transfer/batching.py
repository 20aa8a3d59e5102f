"""Make a batch smaller: merge neighbours, cap the number of copies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvtier.devices.base import CopyBatch

MAX_COPIES = 4096
"""Copies per submission. Ascend's driver refuses more, HIP and CUDA have faulted far above it."""


def coalesce(batch: CopyBatch) -> CopyBatch:
    """Merge copies that are adjacent on both sides, in the order given; drop empty ones.

    No driver merges them, and small copies cost more than their bytes.
    """
    keep = batch.size > 0
    src, dst, size = batch.src_offset[keep], batch.dst_offset[keep], batch.size[keep]
    if len(size) < 2:
        return CopyBatch(batch.src, batch.dst, src, dst, size)
    starts_run = np.empty(len(size), bool)
    starts_run[0] = True
    np.not_equal(src[:-1] + size[:-1], src[1:], out=starts_run[1:])
    starts_run[1:] |= dst[:-1] + size[:-1] != dst[1:]
    first = np.flatnonzero(starts_run)
    merged = np.add.reduceat(size, first)
    return CopyBatch(batch.src, batch.dst, src[first], dst[first], merged, batch.num_bytes)


def split(batch: CopyBatch, max_copies: int = MAX_COPIES) -> Iterator[CopyBatch]:
    """The same copies in batches of at most ``max_copies``."""
    for start in range(0, len(batch.size), max_copies):
        piece = slice(start, start + max_copies)
        yield CopyBatch(
            batch.src,
            batch.dst,
            batch.src_offset[piece],
            batch.dst_offset[piece],
            batch.size[piece],
        )
