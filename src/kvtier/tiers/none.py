"""A storage tier where there is none."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.devices.base import Finding
from kvtier.layout import KVGroup
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import Outcome, StorageFacts, StorageTier
from kvtier.types import BlockKey, BlockName


class NoStorage(StorageTier):
    """Has no room and finds nothing: stands in for a tier that can't be opened."""

    facts = StorageFacts(finds_at_once=True)
    num_blocks = 0
    num_unfound = 0
    has_unfound = False

    def __init__(self, name: str, group: KVGroup) -> None:
        self.name = name
        self.bytes_per_block = group.bytes_per_block

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        return [Outcome.ABSENT] * len(keys)

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        return [Outcome.FAILED] * len(names)

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        return [Outcome.ABSENT] * len(keys)

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        pass

    def findings(self) -> list[Finding]:
        return [Finding(f"{self.name} tier", "none")]

    def close(self) -> None:
        pass
