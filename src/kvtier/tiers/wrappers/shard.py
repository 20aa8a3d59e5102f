"""A rank's shards of blocks, in a store that several ranks and engines share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtier.core.types import BlockKey, BlockName, keys_of
from kvtier.tiers.crc_join import copied_crcs
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import KeptKeys, Outcome, StorageTier
from kvtier.tiers.wrappers.wrapper import StorageWrapper

THERE, ABSENT, DAMAGED, FAILED = Outcome
SMALL_PIECE = 4096
"""Pieces below these bytes are copied together before they are written: a store's client would take
longer to send them one by one."""
WORST_FIRST = (DAMAGED, ABSENT, FAILED, THERE)
"""The outcome of a block is the first of these that one of its shards has."""


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Shards that one rank has of every block; each is a value of its own in a store.

    Args:
        names: of each shard. Shards of equal names have equal bytes in all engines and ranks.
        offsets: int64 [num_shards, num_pieces], where the pieces of each shard begin in a block.
        sizes: int64 [num_pieces], bytes of each piece. The value is the pieces in this order.
        block_bytes: of a block in the rank's memory.
        is_writer: whether this rank writes its shards; False if another rank writes the same.
    """

    names: tuple[bytes, ...]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    block_bytes: int
    is_writer: bool = True

    @classmethod
    def whole(cls, name: str, block_bytes: int) -> Shards:
        """Return one shard, which is all that the rank has of a block."""
        sizes = np.array([block_bytes], np.int64)
        return cls((name.encode(),), np.zeros((1, 1), np.int64), sizes, block_bytes)

    @classmethod
    def joined(
        cls,
        names: Sequence[bytes],
        offsets: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        block_bytes: int,
        is_writer: bool,
        seams: npt.ArrayLike = (),
    ) -> Shards:
        """Return shards of as few pieces as possible.

        Pieces that are neighbours in the blocks of all shards are one.

        seams: offsets in a block that no piece may cross, because its bytes lie apart there.
        """
        begins = np.ones(len(sizes), bool)
        begins[1:] = (offsets[:, 1:] != offsets[:, :-1] + sizes[:-1]).any(axis=0)
        begins |= np.isin(offsets, seams).any(axis=0)
        first = np.flatnonzero(begins)
        at, num_bytes = np.ascontiguousarray(offsets[:, first]), np.add.reduceat(sizes, first)
        return cls(tuple(names), at, num_bytes, block_bytes, is_writer)

    @property
    def bytes_per_shard(self) -> int:
        return int(self.sizes.sum())


class ShardTier(StorageWrapper):
    """The ranks call their shards of a block by the block's key; the store has one key per shard.

    A block is there if all shards of this rank are.

    inner: the store, with blocks of ``shards.bytes_per_shard``.
    """

    def __init__(self, inner: StorageTier, shards: Shards) -> None:
        super().__init__(inner)
        self.bytes_per_block = shards.block_bytes
        self._shards = shards

    @property
    def num_blocks(self) -> int:
        return self.inner.num_blocks // len(self._shards.names)

    def unindexed_keys(self) -> list[BlockKey]:
        return []  # nobody can tell what they are called outside

    def lasting_keys(self) -> list[BlockKey]:
        return []

    def kept_keys(self) -> KeptKeys:
        return KeptKeys()

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        # Block after block: a store may look up nothing behind the first one that it lacks.
        by_block = zip(*self._keys(keys), strict=True)
        outcomes = super().find([*chain.from_iterable(by_block)], timeout_s)
        num = len(self._shards.names)
        return [_worst(outcomes[at : at + num]) for at in range(0, len(outcomes), num)]

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        if not self._shards.is_writer:
            return [THERE] * len(names)
        ours = [
            name._replace(key=key)
            for keys in self._keys(keys_of(names))
            for name, key in zip(names, keys, strict=True)
        ]
        shards, _memory = _in_one_piece(self._cut(blocks))
        return self._by_block(super().put(ours, shards, timeout_s), len(names))

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        ours = [*chain.from_iterable(self._keys(keys))]
        return self._by_block(super().get(ours, self._cut(blocks), timeout_s), len(keys))

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        super().drop([*chain.from_iterable(self._keys(keys))], for_good)

    def _keys(self, keys: Sequence[BlockKey]) -> list[list[BlockKey]]:
        """Return the keys of the first shard of all blocks, then those of the second, and so on.

        In this order shards that one rank reads are neighbours in a pack.
        """
        return [
            [BlockKey(blake3(key + name).digest()) for key in keys] for name in self._shards.names
        ]

    def _cut(self, blocks: Pieces) -> Pieces:
        """Return the shards of blocks, in the order of ``_keys``."""
        shards = self._shards
        if len(shards.names) == 1 and shards.bytes_per_shard == shards.block_bytes:
            return blocks
        return blocks.gather(shards.offsets, shards.sizes)

    def _by_block(self, outcomes: Sequence[Outcome], num_blocks: int) -> list[Outcome]:
        """Return the outcome of each block from those of its shards, in the order of ``_keys``."""
        return [_worst(outcomes[at::num_blocks]) for at in range(num_blocks)]


def _worst(outcomes: Sequence[Outcome]) -> Outcome:
    return min(outcomes, key=WORST_FIRST.index)


def _in_one_piece(shards: Pieces) -> tuple[Pieces, npt.NDArray[np.uint8] | None]:
    """Return shards, copied if their pieces are small, and the memory of the copy."""
    num_bytes = shards.block_bytes
    if num_bytes >= SMALL_PIECE * len(shards.sizes):
        return shards, None
    memory = np.empty((len(shards), num_bytes), np.uint8)
    copy = Pieces.whole(memory.ctypes.data + num_bytes * np.arange(len(shards)), num_bytes)
    copied_crcs(copy.cut(shards.sizes), shards)
    return copy, memory
