"""Operations on blocks by number, shared by both indices of the native core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from kvtier._hot import BlockTrie
from kvtier._hot import KeyIndex as KeyCore
from kvtier.index.block_index import BlockIndex
from kvtier.index.residency import State
from kvtier.types import AnyColumn, BlockId, Slot


class NativeBlocks(BlockIndex):
    """Index whose blocks are kept by ``_core``, an object of the native core."""

    _core: BlockTrie | KeyCore

    def states_of(self, blocks: Iterable[BlockId], column: AnyColumn) -> list[State]:
        return cast("list[State]", self._core.states_of(blocks, column))

    def slots(self, blocks: Iterable[BlockId], column: AnyColumn) -> Sequence[Slot]:
        return cast("Sequence[Slot]", self._core.slots(blocks, column))

    def num_uses(self, block: BlockId) -> int:
        return self._core.num_uses(block)

    def num_uses_of(self, blocks: Iterable[BlockId]) -> Sequence[int]:
        return self._core.num_uses_of(blocks)

    def num_leases(self, block: BlockId, column: AnyColumn) -> int:
        return self._core.num_leases(block, column)

    def num_evictable(self, column: AnyColumn) -> int:
        return self._core.num_evictable(column)

    def num_held(self, column: AnyColumn) -> int:
        return self._core.num_held(column)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory of blocks, lookup table and queues, including free places."""
        return self._core.num_bytes()

    def __len__(self) -> int:
        return len(self._core)

    def begin_write(self, block: BlockId, column: AnyColumn, slot: Slot) -> None:
        self._core.begin_write((block,), column, (slot,))

    def begin_write_all(
        self, blocks: Iterable[BlockId], column: AnyColumn, slots: Iterable[Slot]
    ) -> None:
        self._core.begin_write(blocks, column, slots)

    def commit(self, block: BlockId, column: AnyColumn, now: float) -> None:
        self.commit_all((block,), column, now)

    def abort(self, block: BlockId, column: AnyColumn) -> Slot:
        return self.abort_all((block,), column)[0]

    def abort_all(self, blocks: Iterable[BlockId], column: AnyColumn) -> Sequence[Slot]:
        return cast("Sequence[Slot]", self._core.abort(blocks, column))

    def set_recompute_slope(self, at_blocks: float) -> None:
        self._core.set_doubling(at_blocks)

    def set_room(self, column: AnyColumn, num_blocks: int) -> None:
        self._core.set_room(column, num_blocks)

    def lease(self, blocks: Iterable[BlockId], column: AnyColumn) -> None:
        self._core.lease(blocks, column)

    def release(self, blocks: Iterable[BlockId], column: AnyColumn) -> None:
        self._core.release(blocks, column)

    def evict(self, column: AnyColumn, num_blocks: int) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self._core.evict(column, num_blocks))

    def forget(self, block: BlockId, column: AnyColumn) -> Slot:
        return self.forget_all((block,), column)[0]

    def forget_all(self, blocks: Iterable[BlockId], column: AnyColumn) -> Sequence[Slot]:
        return cast("Sequence[Slot]", self._core.forget(blocks, column))

    def keep(self, block: BlockId, column: AnyColumn) -> None:
        self._core.keep((block,), column)

    def lose(self, block: BlockId, column: AnyColumn) -> Slot | None:
        return cast("Slot | None", self._core.lose(block, column))

    def check_invariants(self) -> None:
        self._core.check_invariants()
