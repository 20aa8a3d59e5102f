"""A storage tier where there is none."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.devices.base import Finding
from kvtier.layout import KVGroup
from kvtier.tiers.base import Addresses, LoadResult, StorageTier
from kvtier.types import DISK, BlockKey, BlockName, Slot


class NoStorage(StorageTier):
    """Has no room and finds nothing: stands in for a tier that can't be opened."""

    name = DISK
    num_slots = 0
    num_free = 0
    num_unclaimed = 0
    can_load = False
    can_store = False

    def __init__(self, group: KVGroup) -> None:
        self.bytes_per_block = group.bytes_per_block

    def allocate(self, num_slots: int) -> list[Slot] | None:
        return None if num_slots else []

    def free(self, slots: list[Slot]) -> None:
        assert not slots, "slots that this tier never gave out"

    def claim(self, keys: Sequence[BlockKey]) -> list[Slot]:
        return []

    def store(
        self, names: Sequence[BlockName], slots: Sequence[Slot], addresses: Addresses
    ) -> list[bool]:
        return [False] * len(names)

    def load(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], addresses: Addresses
    ) -> list[LoadResult]:
        return [LoadResult.FAILED] * len(keys)

    def findings(self) -> list[Finding]:
        return [Finding("disk tier", "none")]

    def close(self) -> None:
        pass
