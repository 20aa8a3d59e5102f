"""From slots to bytes: a copy of blocks between two tiers, as batches of small copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import CopyBatch
from kvtier.layout import fragments, stepped_fragments
from kvtier.tiers.base import MemoryTier
from kvtier.transfer.batching import coalesce
from kvtier.types import Slot

Int64s = npt.NDArray[np.int64]

STEP_BYTES = 1 << 20
"""What a step moves at least: less is not worth a submission and a fence of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """A copy in steps, cut where it is gone through: by the worker that does it, not by the thread
    that plans it. Layer l arrives with step ``l // layers_per_step``.

    whole: all copies, step after step. ends: of each step in ``whole``. step_bytes: of each.
    can_touch: which steps may have neighbours that are one copy.
    """

    whole: CopyBatch
    layers_per_step: int
    ends: tuple[int, ...]
    step_bytes: tuple[int, ...]
    can_touch: tuple[bool, ...]
    src_seams: Int64s
    dst_seams: Int64s

    @property
    def num_bytes(self) -> int:
        """Of all steps."""
        return self.whole.num_bytes

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[CopyBatch]:
        whole, start = self.whole, 0
        for end, num_bytes, can_touch in zip(
            self.ends, self.step_bytes, self.can_touch, strict=True
        ):
            at, to = whole.src_offset[start:end], whole.dst_offset[start:end]
            step = CopyBatch(whole.src, whole.dst, at, to, whole.size[start:end], num_bytes)
            yield coalesce(step, self.src_seams, self.dst_seams) if can_touch else step
            start = end


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
    num_steps = min(group.num_layers, max(1, num_bytes // STEP_BYTES))
    stepped = stepped_fragments(src.layout, dst.layout, -(-group.num_layers // num_steps))
    pieces, num_blocks = stepped.fragments, len(src_slots)
    at = _by_fragment(pieces.src_offset, pieces.src_stride, src_slots)
    to = _by_fragment(pieces.dst_offset, pieces.dst_stride, dst_slots)
    size = np.repeat(pieces.size, num_blocks)
    return Steps(
        CopyBatch(src.memory, dst.memory, at, to, size, num_bytes),
        stepped.layers_per_step,
        tuple(end * num_blocks for end in accumulate(stepped.counts)),
        tuple(num_blocks * nbytes for nbytes in stepped.num_bytes),
        stepped.can_touch,
        src.seams,
        dst.seams,
    )


def _by_fragment(offset: Int64s, stride: Int64s, slots: Sequence[Slot]) -> Int64s:
    """Where each fragment of each block begins: int64 [num_fragments * num_blocks]."""
    blocks = np.asarray(slots, np.int64)
    if (stride == stride[0]).all():
        begins = np.add.outer(offset, blocks * stride[0])
    else:
        begins = offset[:, None] + np.multiply.outer(stride, blocks)
    return np.asarray(begins).reshape(-1)


def _have_neighbours(at: Int64s, to: Int64s, last_size: int) -> bool:
    """Whether some block begins where the one before it ends, on both sides. Within a block the
    fragments are merged already."""
    follows = at[:-1, -1] + last_size == at[1:, 0]
    follows &= to[:-1, -1] + last_size == to[1:, 0]
    return bool(follows.any())
