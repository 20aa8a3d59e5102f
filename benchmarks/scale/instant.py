"""A storage tier that completes at once: blocks lie in memory, and the native copy moves them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.core.hot import KeyTable, copy_batch
from kvtier.core.types import BlockKey, BlockName, keys_of
from kvtier.devices import Finding
from kvtier.layout import KVGroup
from kvtier.tiers import Outcome, Pieces, StorageFacts, StorageTier
from kvtier.tiers.disk.format.records import as_keys


class InstantShelf:
    """Content that outlives the tier: uint8 [num_blocks, bytes_per_block]."""

    def __init__(self, group: KVGroup, num_blocks: int) -> None:
        self.content = np.zeros((num_blocks, group.bytes_per_block), np.uint8)
        self.rows = KeyTable(np.empty(0, "V32"), np.empty(0, np.int64))


class InstantStorage(StorageTier):
    """Storage that never refuses and never loses a block.

    ``is_new``: the cache does not know the stored blocks and has to look them up.
    """

    name = "instant"
    facts = StorageFacts(finds_at_once=True)

    def __init__(self, shelf: InstantShelf, is_new: bool) -> None:
        self._shelf = shelf
        self._is_new = is_new
        self.bytes_per_block = shelf.content.shape[1]

    @property
    def num_blocks(self) -> int:
        return len(self._shelf.content)

    @property
    def has_unindexed(self) -> bool:
        return self._is_new

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        there = self._shelf.rows.find(as_keys(keys)) >= 0
        if there.all():
            return [Outcome.THERE] * len(keys)
        return [Outcome.THERE if each else Outcome.ABSENT for each in there]

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        rows, keys = self._shelf.rows, as_keys(keys_of(names))
        at = rows.find(keys)
        at[at < 0] = len(rows) + np.arange(np.count_nonzero(at < 0))
        rows.put(keys, at)
        self._copy(self._addresses(at), blocks.addresses[:, 0])
        return [Outcome.THERE] * len(names)

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        at = self._shelf.rows.find(as_keys(keys))
        assert (at >= 0).all(), "asked for what is not there"
        self._copy(blocks.addresses[:, 0], self._addresses(at))
        return [Outcome.THERE] * len(keys)

    def _addresses(self, at: np.ndarray) -> np.ndarray:
        begin = self._shelf.content.ctypes.data
        return (at * self.bytes_per_block + begin).astype(np.uint64)

    def _copy(self, dst: np.ndarray, src: np.ndarray) -> None:
        sizes = np.full(len(dst), self.bytes_per_block, np.uint64)
        copy_batch(np.ascontiguousarray(dst), np.ascontiguousarray(src), sizes, 1)

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        return

    def findings(self) -> list[Finding]:
        return []

    def close(self) -> None:
        return
