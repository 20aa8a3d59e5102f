"""A storage tier that answers at once: blocks side by side in memory, moved by the native copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier._hot import copy_batch
from kvtier.devices import Finding
from kvtier.layout import KVGroup
from kvtier.tiers import Outcome, Pieces, StorageFacts, StorageTier
from kvtier.types import BlockKey, BlockName, keys_of


class InstantShelf:
    """What outlives the tier. content: uint8 [num_blocks, bytes_per_block]."""

    def __init__(self, group: KVGroup, num_blocks: int) -> None:
        self.content = np.zeros((num_blocks, group.bytes_per_block), np.uint8)
        self.rows: dict[BlockKey, int] = {}


class InstantStorage(StorageTier):
    """Never refuses and never forgets. is_new: it has to be asked for what the shelf has."""

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
    def has_unfound(self) -> bool:
        return self._is_new

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        rows = self._shelf.rows
        if all(map(rows.__contains__, keys)):
            return [Outcome.THERE] * len(keys)
        return [Outcome.THERE if key in rows else Outcome.ABSENT for key in keys]

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        rows = self._shelf.rows
        at = [rows.setdefault(key, len(rows)) for key in keys_of(names)]
        self._copy(self._addresses(at), blocks.addresses[:, 0])
        return [Outcome.THERE] * len(names)

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        at = list(map(self._shelf.rows.__getitem__, keys))
        self._copy(blocks.addresses[:, 0], self._addresses(at))
        return [Outcome.THERE] * len(keys)

    def _addresses(self, at: list[int]) -> np.ndarray:
        begin = self._shelf.content.ctypes.data
        return (np.array(at, np.int64) * self.bytes_per_block + begin).astype(np.uint64)

    def _copy(self, dst: np.ndarray, src: np.ndarray) -> None:
        sizes = np.full(len(dst), self.bytes_per_block, np.uint64)
        copy_batch(np.ascontiguousarray(dst), np.ascontiguousarray(src), sizes, 1)

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        return

    def findings(self) -> list[Finding]:
        return []

    def close(self) -> None:
        return
