"""Flat index of the native core: one call per prompt, no Python object per block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtier.core.hints import BlockHint
from kvtier.core.hot import KeyIndex as Core
from kvtier.core.keys import PackedKeys, select_keys
from kvtier.core.types import BlockId, Slot
from kvtier.index.block_index import check_time
from kvtier.index.key_index import KeyedBlock, KeyIndex, KeyMatches, MissingKeys
from kvtier.index.native_blocks import NativeBlocks
from kvtier.index.residency import State
from kvtier.index.slot_leases import SlotArrays, SlotLeases


class NativeKeyIndex(NativeBlocks, KeyIndex):
    """Key index that keeps blocks in rows of the native core."""

    _core: Core

    def __init__(
        self,
        policies: Mapping[str, str],
        namespace: Callable[[], bytes],
        group_bytes: int = 0,
    ) -> None:
        assert Core is not None, "the native core is missing"
        super().__init__(policies, namespace, group_bytes)
        self._core = Core(self.tiers, self._policies, tuple(State), group_bytes)

    # -- queries ----------------------------------------------------------------------------------

    def find_all(self, keys: Collection[bytes]) -> KeyMatches:
        blocks, states = self._core.find(_core_keys(keys))
        return KeyMatches(cast("Sequence[BlockId]", blocks), states)

    def missing(self, keys: Collection[bytes], tier: str) -> MissingKeys:
        listed = keys if isinstance(keys, Sequence) else list(keys)
        positions, ready = self._core.missing(_core_keys(listed), tier)
        new = listed if len(positions) == len(listed) else select_keys(listed, positions)
        return MissingKeys(new, cast("Sequence[BlockId]", ready))

    def hashes(self, blocks: Sequence[BlockId]) -> Sequence[int]:
        return self._core.hashes(blocks)

    def in_slots(self, slots: Collection[Slot], tier: str) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self._core.in_slots(slots, tier))

    def state(self, block: BlockId, tier: str) -> State:
        return self.states_of((block,), tier)[0]

    def keys(self, blocks: Iterable[BlockId]) -> list[bytes]:
        return self._core.keys(blocks)

    def facts(self, blocks: Sequence[BlockId]) -> tuple[bytes, Sequence[int]]:
        return self._core.facts(blocks)

    def depth(self, block: BlockId) -> int:
        return self._core.depth(block)

    # -- writing ----------------------------------------------------------------------------------

    def expect(self, num_blocks: int) -> None:
        self._core.expect(num_blocks)

    def make(self, keys: Sequence[bytes]) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self._core.make(_core_keys(keys)))

    def write_new(
        self, keys: Sequence[bytes], tier: str, slots: Sequence[Slot], now: float
    ) -> tuple[Sequence[BlockId], Sequence[int]]:
        check_time(now)
        blocks, hashes = self._core.write_new(_core_keys(keys), tier, slots)
        return cast("Sequence[BlockId]", blocks), hashes

    def commit_prompt(
        self, blocks: Sequence[BlockId], depths: Sequence[int], tier: str, now: float
    ) -> None:
        check_time(now)
        self._core.commit_prompt(blocks, depths, tier)

    def set_depths(self, blocks: Sequence[BlockId], depths: Sequence[int]) -> None:
        self._core.set_depths(blocks, depths)

    def commit(self, blocks: Iterable[BlockId], tier: str, now: float) -> None:
        check_time(now)
        self._core.commit(blocks, tier)

    # -- requests ---------------------------------------------------------------------------------

    def set_num_last(self, num_blocks: int) -> None:
        self._core.set_num_last(num_blocks)

    def on_request(self, keys: Iterable[bytes], now: float) -> None:
        self._core.asked(_core_keys(keys), now)

    def retain(self, keys: Iterable[bytes], block_hint: BlockHint, now: float) -> None:
        self._core.retain(_core_keys(keys), block_hint, now)

    def continues(self, keys: Iterable[bytes], before: bytes) -> None:
        self._core.continues(_core_keys(keys), before)

    def admit_keys(
        self, keys: Sequence[bytes], tier: str, num_free: int, least_chance: float = 0.0
    ) -> Sequence[bytes]:
        return select_keys(keys, self._core.admit(_core_keys(keys), tier, num_free, least_chance))

    # -- use --------------------------------------------------------------------------------------

    def touch(self, blocks: Iterable[BlockId], now: float) -> None:
        check_time(now)
        self._core.touch(blocks)

    def slot_leases(
        self,
        tier: str,
        arrays: SlotArrays,
        num_leases: npt.NDArray[np.uint32],
        is_reserved: npt.NDArray[np.bool_],
        bit: int,
        keeps: int,
    ) -> SlotLeases:
        made = self._core.slot_leases(tier, arrays, num_leases, is_reserved, bit, keeps)
        return cast("SlotLeases", made)

    # -- for tests and diagnosis ------------------------------------------------------------------

    def known(self) -> list[KeyedBlock]:
        return [
            KeyedBlock(BlockId(block), key, num_uses, depth, tuple(places))  # type: ignore[arg-type]
            for block, key, num_uses, depth, places in self._core.dump()
        ]

    def order(self, tier: str) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self._core.order(tier))

    def describe(self) -> str:
        return f"native, by key, {', '.join(sorted(set(self._policies)))}"


def _core_keys(keys: Iterable[bytes]) -> Iterable[bytes]:
    """Return keys as the core reads them fastest."""
    return cast("Iterable[bytes]", keys.array) if isinstance(keys, PackedKeys) else keys
