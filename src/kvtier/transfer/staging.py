"""From slots to bytes: a copy of blocks between two tiers, as one batch of small copies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.devices.base import CopyBatch
from kvtier.layout import fragments
from kvtier.tiers.base import MemoryTier
from kvtier.transfer.batching import coalesce
from kvtier.types import Slot


def stage(
    src: MemoryTier, src_slots: Sequence[Slot], dst: MemoryTier, dst_slots: Sequence[Slot]
) -> CopyBatch:
    """Copies that move slot ``src_slots[i]`` of ``src`` to slot ``dst_slots[i]`` of ``dst``.

    Block by block, fragments within a block in the order of the destination; what is adjacent on
    both sides is merged.
    """
    pieces = fragments(src.layout, dst.layout)
    at = np.asarray(src_slots, np.int64)[:, None]
    to = np.asarray(dst_slots, np.int64)[:, None]
    src_offset = pieces.src_offset + at * pieces.src_stride
    dst_offset = pieces.dst_offset + to * pieces.dst_stride
    size = np.broadcast_to(pieces.size, src_offset.shape)
    return coalesce(
        CopyBatch(src.memory, dst.memory, src_offset.ravel(), dst_offset.ravel(), size.ravel())
    )
