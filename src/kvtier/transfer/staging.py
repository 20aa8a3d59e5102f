"""From slots to bytes: a copy of blocks between two tiers, as batches of small copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import CopyBatch
from kvtier.layout import SteppedFragments, fragments, stepped_fragments
from kvtier.tiers.base import MemoryTier
from kvtier.transfer.batching import coalesce
from kvtier.types import Slot

Int64s = npt.NDArray[np.int64]

STEP_BYTES = 1 << 20
"""Least bytes of a step: fewer are not worth a submission and a fence."""


class Steps(ABC):
    """A copy in steps, worked out where it is gone through.

    By the worker that does it, not by the thread that plans it. Layer l arrives with step ``l //
    layers_per_step``. num_bytes: of all.
    """

    num_bytes: int

    @property
    @abstractmethod
    def layers_per_step(self) -> int:
        """Return the layers per step; the last step may have fewer."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of steps."""

    @abstractmethod
    def __iter__(self) -> Iterator[CopyBatch]:
        """The steps, in their order."""


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
    """Return how many layers one step copies, so that it is worth its submission."""
    num_steps = min(num_layers, max(1, num_bytes // STEP_BYTES))
    return -(-num_layers // num_steps)


def stage(
    src: MemoryTier, src_slots: Sequence[Slot], dst: MemoryTier, dst_slots: Sequence[Slot]
) -> CopyBatch:
    """Copies that move slot ``src_slots[i]`` of ``src`` to slot ``dst_slots[i]`` of ``dst``.

    Block by block, fragments within a block in the order of the destination; what is adjacent on
    both sides is merged.
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
    """The copies of ``stage``, a layer after the other, so that compute can follow close behind.

    A step is as many layers as make ``STEP_BYTES``. It is one step for all where cutting between
    layers would cut what is one piece (see ``stepped_fragments``). Fragment by fragment, blocks
    within a fragment in the order given.
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

    Within a block the fragments are merged already.
    """
    follows = at[:-1, -1] + last_size == at[1:, 0]
    follows &= to[:-1, -1] + last_size == to[1:, 0]
    return bool(follows.any())
