"""Flat index of the native core: one call per prompt, no Python object per block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import cast

from kvtier._hot import KeyIndex as Core
from kvtier.hints import Said
from kvtier.index.block_index import check_time
from kvtier.index.key_index import KeyedBlock, KeyIndex, KeyMatches
from kvtier.index.native_blocks import NativeBlocks
from kvtier.index.policies.replayed import RUNS
from kvtier.index.residency import State
from kvtier.types import AnyColumn, BlockId


class NativeKeyIndex(NativeBlocks, KeyIndex):
    """Key index that keeps blocks in rows of the native core."""

    _core: Core

    def __init__(
        self,
        tiers: Sequence[str],
        namespace: Callable[[], bytes],
        learning: Collection[str] = (),
        policy: str = RUNS,
        group_bytes: int = 0,
    ) -> None:
        assert Core is not None, "the native core is missing"
        super().__init__(tiers, namespace, learning, policy, group_bytes)
        self._core = Core(self.tiers, tuple(State), self.learning, policy, group_bytes)

    # -- queries ----------------------------------------------------------------------------------

    def find_all(self, keys: Sequence[bytes]) -> KeyMatches:
        return KeyMatches(*self._core.find(keys))  # type: ignore[arg-type]

    def state(self, block: BlockId, column: AnyColumn) -> State:
        return self.states_of((block,), column)[0]

    def keys(self, blocks: Iterable[BlockId]) -> list[bytes]:
        return self._core.keys(blocks)

    def depth(self, block: BlockId) -> int:
        return self._core.depth(block)

    # -- writing ----------------------------------------------------------------------------------

    def expect(self, num_blocks: int) -> None:
        self._core.expect(num_blocks)

    def make(self, keys: Sequence[bytes]) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self._core.make(keys))

    def set_depths(self, blocks: Sequence[BlockId], depths: Sequence[int]) -> None:
        self._core.set_depths(blocks, depths)

    def commit_all(self, blocks: Iterable[BlockId], column: AnyColumn, now: float) -> None:
        check_time(now)
        self._core.commit(blocks, column)

    # -- requests ---------------------------------------------------------------------------------

    def on_request(self, keys: Iterable[bytes], now: float) -> None:
        self._core.asked(dict.fromkeys(keys), now)

    def retain(self, keys: Iterable[bytes], said: Said, now: float) -> None:
        self._core.retain(dict.fromkeys(keys), said, now)

    def continues(self, keys: Iterable[bytes], before: bytes) -> None:
        self._core.continues(keys, before)

    def admit_keys(
        self, keys: Sequence[bytes], column: AnyColumn, num_free: int, least_chance: float = 0.0
    ) -> list[bytes]:
        return [keys[at] for at in self._core.admit(keys, column, num_free, least_chance)]

    # -- use --------------------------------------------------------------------------------------

    def touch(self, blocks: Iterable[BlockId], now: float) -> None:
        check_time(now)
        self._core.touch(blocks)

    # -- for tests and diagnosis ------------------------------------------------------------------

    def known(self) -> list[KeyedBlock]:
        return [
            KeyedBlock(BlockId(block), key, num_uses, depth, tuple(places))  # type: ignore[arg-type]
            for block, key, num_uses, depth, places in self._core.dump()
        ]

    def order(self, column: AnyColumn) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self._core.order(column))

    def describe(self) -> str:
        return f"native, by key, {self.policies}"
