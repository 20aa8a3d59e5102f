"""From slots to bytes: a copy of blocks between two tiers, as one batch of small copies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import CopyBatch
from kvtier.layout import fragments
from kvtier.tiers.base import MemoryTier
from kvtier.transfer.batching import coalesce
from kvtier.types import Slot

Int64s = npt.NDArray[np.int64]


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


def _have_neighbours(at: Int64s, to: Int64s, last_size: int) -> bool:
    """Whether some block begins where the one before it ends, on both sides. Within a block the
    fragments are merged already."""
    follows = at[:-1, -1] + last_size == at[1:, 0]
    follows &= to[:-1, -1] + last_size == to[1:, 0]
    return bool(follows.any())
