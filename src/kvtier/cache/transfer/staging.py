"""Translates a copy of blocks between two tiers into batches of small copies.

Neighbouring copies are merged, and the copies of a submission are limited.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.core.types import Slot
from kvtier.devices.base import CopyBatch, Int64s
from kvtier.layout import SteppedFragments, fragments, stepped_fragments
from kvtier.tiers.base import MemoryTier

STEP_BYTES = 1 << 20
"""Minimum size of a step: fewer bytes are not worth a submission and a fence."""
MAX_COPIES = 4096
"""Copies per submission. Ascend's driver refuses more, HIP and CUDA have faulted far above it."""
NO_SEAMS = np.empty(0, np.int64)


class Steps(ABC):
    """A copy in steps, whose batches are computed during iteration.

    So the worker that copies computes them, not the thread that plans. Layer l arrives with step
    ``l // layers_per_step``. num_bytes: total of all steps.
    """

    num_bytes: int

    @property
    @abstractmethod
    def layers_per_step(self) -> int:
        """Layers per step; the last step may have fewer."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of steps."""

    @abstractmethod
    def __iter__(self) -> Iterator[CopyBatch]:
        """Yield the batches of the steps, in order."""


@dataclass(frozen=True, eq=False)
class SlotSteps(Steps):
    """Copies from slot ``src_slots[i]`` to slot ``dst_slots[i]``."""

    src: MemoryTier
    src_slots: Sequence[Slot]
    dst: MemoryTier
    dst_slots: Sequence[Slot]
    stepped: SteppedFragments
    num_bytes: int

    @property
    def layers_per_step(self) -> int:
        return self.stepped.layers_per_step

    def __len__(self) -> int:
        return len(self.stepped.counts)

    def __iter__(self) -> Iterator[CopyBatch]:
        src, dst, stepped, num_blocks = self.src, self.dst, self.stepped, len(self.src_slots)
        pieces, start = stepped.fragments, 0
        at = _by_fragment(pieces.src_offset, pieces.src_stride, self.src_slots)
        to = _by_fragment(pieces.dst_offset, pieces.dst_stride, self.dst_slots)
        size = np.repeat(pieces.size, num_blocks)
        for count, num_bytes, can_touch in zip(
            stepped.counts, stepped.num_bytes, stepped.can_touch, strict=True
        ):
            part = slice(start, start + num_blocks * count)
            step = CopyBatch(
                src.memory, dst.memory, at[part], to[part], size[part], num_blocks * num_bytes
            )
            yield coalesce(step, src.seams, dst.seams) if can_touch else step
            start = part.stop


def layers_per_step(num_layers: int, num_bytes: int) -> int:
    """Return how many layers one step copies, so that a step is worth its submission."""
    num_steps = min(num_layers, max(1, num_bytes // STEP_BYTES))
    return -(-num_layers // num_steps)


def stage(
    src: MemoryTier, src_slots: Sequence[Slot], dst: MemoryTier, dst_slots: Sequence[Slot]
) -> CopyBatch:
    """Return the copies from slot ``src_slots[i]`` of ``src`` to slot ``dst_slots[i]`` of ``dst``.

    Copies are ordered by block, then by fragment in the order of the destination. Copies that are
    adjacent on both sides are merged.
    """
    pieces = fragments(src.layout, dst.layout)
    at = pieces.src(np.asarray(src_slots, np.int64))
    to = pieces.dst(np.asarray(dst_slots, np.int64))
    size = np.broadcast_to(pieces.size, at.shape)
    num_bytes = len(src_slots) * src.layout.group.bytes_per_block
    batch = CopyBatch(src.memory, dst.memory, at.ravel(), to.ravel(), size.ravel(), num_bytes)
    if not _have_neighbours(at, to, pieces.size[-1]):
        return batch
    return coalesce(batch, src.seams, dst.seams)


def stage_steps(
    src: MemoryTier, src_slots: Sequence[Slot], dst: MemoryTier, dst_slots: Sequence[Slot]
) -> Steps:
    """Return the copies of ``stage`` in steps of whole layers, so that compute can follow them.

    A step has as many layers as make ``STEP_BYTES``. There is only one step if a cut between layers
    would cut a contiguous piece (see ``stepped_fragments``). Copies are ordered by fragment, then
    by block.
    """
    group = src.layout.group
    num_bytes = len(src_slots) * group.bytes_per_block
    stepped = stepped_fragments(
        src.layout, dst.layout, layers_per_step(group.num_layers, num_bytes)
    )
    return SlotSteps(src, src_slots, dst, dst_slots, stepped, num_bytes)


def _by_fragment(offset: Int64s, stride: Int64s, slots: Sequence[Slot]) -> Int64s:
    """Return the offset of each fragment of each block: int64 [num_fragments * num_blocks]."""
    blocks = np.asarray(slots, np.int64)
    if (stride == stride[0]).all():
        begins = np.add.outer(offset, blocks * stride[0])
    else:
        begins = offset[:, None] + np.multiply.outer(stride, blocks)
    return np.asarray(begins).reshape(-1)


def _have_neighbours(at: Int64s, to: Int64s, last_size: int) -> bool:
    """Whether some block begins where the one before it ends, on both sides.

    Fragments within a block are merged already.
    """
    follows = at[:-1, -1] + last_size == at[1:, 0]
    follows &= to[:-1, -1] + last_size == to[1:, 0]
    return bool(follows.any())


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
