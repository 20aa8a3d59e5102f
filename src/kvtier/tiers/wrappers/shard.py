"""A rank's part of a store that several ranks share."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import KeptKeys, Outcome, StorageTier
from kvtier.tiers.wrappers.wrapper import StorageWrapper
from kvtier.types import BlockKey, BlockName, keys_of


class ShardTier(StorageWrapper):
    """Every rank calls its shard of a block by the same key.

    In the store each has one of its own, made of that and of ``shard``.

    shard: which of how many, such as "0/8".
    """

    def __init__(self, inner: StorageTier, shard: str) -> None:
        super().__init__(inner)
        self._shard = shard.encode()

    def unfound_keys(self) -> list[BlockKey]:
        return []  # nobody can tell what they are called outside

    def lasting_keys(self) -> list[BlockKey]:
        return []

    def kept_keys(self) -> KeptKeys:
        return KeptKeys()

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        return super().find(self._ours(keys), timeout_s)

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        keys = self._ours(keys_of(names))
        ours = [name._replace(key=key) for name, key in zip(names, keys, strict=True)]
        return super().put(ours, blocks, timeout_s)

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        return super().get(self._ours(keys), blocks, timeout_s)

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        super().drop(self._ours(keys), for_good)

    def _ours(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        return [BlockKey(blake3(key + self._shard).digest()) for key in keys]
