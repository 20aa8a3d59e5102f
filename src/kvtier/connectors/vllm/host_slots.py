"""Slots of blocks, as the scheduler's side tells a rank for a copy."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec

from kvtier.transfer.ranks import RankOrder
from kvtier.types import Slot


class HostSlots(BlockIDsLoadStoreSpec):
    """Locations of a copy's blocks: slots of the host tier, or direct reads from storage.

    Args:
        block_ids: slots of the blocks that pass through host memory, in the order of their keys.
        direct: positions, among all keys of the copy, of the blocks that do not.
        reads: orders to read these blocks to where they are used. The slots of an order are
            positions, too.
    """

    def __init__(
        self,
        block_ids: Sequence[int],
        direct: Sequence[int] = (),
        reads: Sequence[RankOrder] = (),
    ) -> None:
        super().__init__(list(block_ids))
        self.direct = direct
        self.reads = reads

    def by_block(self) -> list[Slot | None]:
        """Return the slot of each block, None for a block that is read directly."""
        held = [Slot(slot) for slot in self.block_ids.tolist()]
        if not self.direct:
            return list(held)
        slots, direct = iter(held), frozenset(self.direct)
        num_blocks = len(held) + len(direct)
        return [None if at in direct else next(slots) for at in range(num_blocks)]
