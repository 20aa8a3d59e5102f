"""Operations on blocks by number, shared by both indices of the native core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from kvtier.core.hot import BlockTrie
from kvtier.core.hot import KeyIndex as KeyCore
from kvtier.core.types import BlockId, Slot
from kvtier.index.block_index import BlockIndex
from kvtier.index.residency import State


class NativeBlocks(BlockIndex):
    """Index whose blocks are kept by ``_core``, an object of the native core."""

    _core: BlockTrie | KeyCore

    def states_of(self, blocks: Iterable[BlockId], tier: str) -> list[State]:
        return cast("list[State]", self._core.states_of(blocks, tier))

    def slots(self, blocks: Iterable[BlockId], tier: str) -> Sequence[Slot]:
        return cast("Sequence[Slot]", self._core.slots(blocks, tier))

    def num_uses(self, blocks: Iterable[BlockId]) -> Sequence[int]:
        return self._core.num_uses_of(blocks)

    def num_leases(self, block: BlockId, tier: str) -> int:
        return self._core.num_leases(block, tier)

    def num_evictable(self, tier: str) -> int:
        return self._core.num_evictable(tier)

    def num_held(self, tier: str) -> int:
        return self._core.num_held(tier)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory of blocks, lookup table and queues, including free places."""
        return self._core.num_bytes()

    def __len__(self) -> int:
        return len(self._core)

    def begin_write(self, blocks: Iterable[BlockId], tier: str, slots: Iterable[Slot]) -> None:
        self._core.begin_write(blocks, tier, slots)

    def abort(self, blocks: Iterable[BlockId], tier: str) -> Sequence[Slot]:
        return cast("Sequence[Slot]", self._core.abort(blocks, tier))

    def set_recompute_slope(self, at_blocks: float) -> None:
        self._core.set_doubling(at_blocks)

    def set_room(self, tier: str, num_blocks: int) -> None:
        self._core.set_room(tier, num_blocks)

    def lease(self, blocks: Iterable[BlockId], tier: str) -> None:
        self._core.lease(blocks, tier)

    def release(self, blocks: Iterable[BlockId], tier: str) -> None:
        self._core.release(blocks, tier)

    def evict(self, tier: str, num_blocks: int) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self._core.evict(tier, num_blocks))

    def forget(self, blocks: Iterable[BlockId], tier: str) -> Sequence[Slot]:
        return cast("Sequence[Slot]", self._core.forget(blocks, tier))

    def keep(self, blocks: Iterable[BlockId], tier: str) -> None:
        self._core.keep(blocks, tier)

    def lose(self, block: BlockId, tier: str) -> Slot | None:
        return cast("Slot | None", self._core.lose(block, tier))

    def check_invariants(self) -> None:
        self._core.check_invariants()
