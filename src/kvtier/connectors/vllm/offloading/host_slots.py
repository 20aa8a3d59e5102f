"""Slots of blocks, as vLLM carries them from the scheduler's side to a rank for a copy."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec

from kvtier.cache.guard import SlotGuard
from kvtier.cache.transfer.ranks import RankOrder
from kvtier.connectors.vllm.shared.copies import BlockSlots
from kvtier.core.types import Slot


class HostSlots(BlockIDsLoadStoreSpec):
    """Locations of a copy's blocks. Arguments: see ``BlockSlots``."""

    def __init__(
        self,
        block_ids: Sequence[int],
        direct: Sequence[int] = (),
        reads: Sequence[RankOrder] = (),
        guard: SlotGuard | None = None,
    ) -> None:
        super().__init__(list(block_ids))
        self.direct = direct
        self.reads = reads
        self.guard = guard

    @classmethod
    def of(cls, slots: BlockSlots) -> HostSlots:
        return cls(slots.slots, slots.direct, slots.reads, slots.guard)

    def to_slots(self) -> BlockSlots:
        slots = [Slot(each) for each in self.block_ids.tolist()]
        return BlockSlots(slots, self.direct, self.reads, self.guard)
