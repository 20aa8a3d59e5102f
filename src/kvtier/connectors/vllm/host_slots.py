"""Slots of blocks, as the scheduler's side tells a rank for a copy."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec

from kvtier.transfer.ranks import RankOrder

STRAIGHT = -1
"""In the place of a slot: the block does not pass through host memory."""


class HostSlots(BlockIDsLoadStoreSpec):
    """Slots of the host tier, one per block, in the order of the keys that were asked for.

    reads: orders to read the blocks that are ``STRAIGHT`` to where they are used. Their slots are
    the places of these blocks in that order.
    """

    def __init__(self, block_ids: Sequence[int], reads: Sequence[RankOrder] = ()) -> None:
        super().__init__(list(block_ids))
        self.reads = reads
