"""A storage tier around another one: passes everything on, for those that change a little of it."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.core.types import BlockKey, BlockName
from kvtier.devices.base import Finding
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import KeptKeys, Outcome, ScrubReport, StorageTier


class StorageWrapper(StorageTier):
    """``inner``, by its own name and with its own facts."""

    def __init__(self, inner: StorageTier) -> None:
        self.name = inner.name
        self.bytes_per_block = inner.bytes_per_block
        self.facts = inner.facts
        self.inner = inner

    @property
    def num_blocks(self) -> int:
        return self.inner.num_blocks

    @property
    def has_unindexed(self) -> bool:
        return self.inner.has_unindexed

    @property
    def last_error(self) -> str:
        return self.inner.last_error

    @property
    def breaker(self) -> BreakerState:
        return self.inner.breaker

    def unindexed_keys(self) -> list[BlockKey]:
        return self.inner.unindexed_keys()

    def lasting_keys(self) -> list[BlockKey]:
        return self.inner.lasting_keys()

    def kept_keys(self) -> KeptKeys:
        return self.inner.kept_keys()

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        return self.inner.find(keys, timeout_s)

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        return self.inner.put(names, blocks, timeout_s)

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        return self.inner.get(keys, blocks, timeout_s)

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        self.inner.drop(keys, for_good)

    def scrub(self, max_bytes: int) -> ScrubReport:
        return self.inner.scrub(max_bytes)

    def findings(self) -> list[Finding]:
        return self.inner.findings()

    def close(self) -> None:
        self.inner.close()
