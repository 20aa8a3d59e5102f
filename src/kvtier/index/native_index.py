"""Prompt index of the native core: one call per prompt, no Python object per block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtier.core.hints import BlockHint
from kvtier.core.hot import BlockTrie, Keys
from kvtier.core.keys import Labels, next_keys
from kvtier.core.types import (
    BlockId,
    BlockKey,
    BlockNames,
    Label,
    Match,
    Slot,
)
from kvtier.index.native_blocks import NativeBlocks
from kvtier.index.prompt_index import Inserted, PromptIndex
from kvtier.index.residency import Residency, State
from kvtier.index.trie import Node

_INT64 = np.dtype(np.int64)
_array_over = np.frombuffer


class NativeIndex(NativeBlocks, PromptIndex):
    """Prompt index that keeps blocks in an arena of the native core.

    policies: name of each tier's native policy, fastest tier first.
    """

    _core: BlockTrie

    def __init__(self, policies: Mapping[str, str]) -> None:
        assert BlockTrie is not None, "the native core is missing"
        self.tiers, self._policies = tuple(policies), tuple(policies.values())
        self._core = BlockTrie(self.tiers, self._policies, tuple(State), Labels, Match)

    # -- queries ----------------------------------------------------------------------------------

    def match(self, namespace: bytes, labels: Sequence[Label]) -> Match:
        return cast("Match", self._core.match(namespace, labels))

    def match_slots(
        self, namespace: bytes, labels: Sequence[Label], tier: str
    ) -> npt.NDArray[np.int64]:
        return _array_over(self._core.match_slots(namespace, labels, tier), _INT64)

    def state(self, block: BlockId, tier: str) -> State:
        return cast("State", self._core.state(block, tier))

    def states(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        tier: str,
        after: BlockId | None = None,
    ) -> list[State]:
        return cast("list[State]", self._core.states(namespace, labels, tier, after))

    def prefixes(self, blocks: Iterable[BlockId], tier: str) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self._core.prefixes(blocks, tier))

    def key(self, block: BlockId) -> BlockKey:
        previous, blocks, labels = self._core.missing_keys(block)
        keys = next_keys(previous, labels)
        self._core.set_keys(blocks, keys)
        return keys[-1] if keys else BlockKey(previous)

    def names(self, blocks: Sequence[BlockId]) -> BlockNames:
        namespaces, depths, keys, are_all_known = self._core.names(blocks)
        if not are_all_known:
            self.key(blocks[-1])  # mostly the other blocks are its prefix
            *_, keys, are_all_known = self._core.names(blocks)
        if not are_all_known:
            keys = Keys(map(self.key, blocks))
        return BlockNames(namespaces, depths, cast("Sequence[BlockKey]", keys))

    def set_keys(self, blocks: Sequence[BlockId], keys: Sequence[BlockKey]) -> None:
        self._core.set_keys(blocks, keys)

    @property
    def num_namespaces(self) -> int:
        return self._core.num_namespaces()

    # -- writing ----------------------------------------------------------------------------------

    def extend(
        self, namespace: bytes, labels: Sequence[Label], after: BlockId | None = None
    ) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self._core.extend(namespace, labels, after))

    def commit(self, blocks: Iterable[BlockId], tier: str, now: float) -> None:
        self._core.commit(blocks, tier, now)

    def insert(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        tier: str,
        slots: Sequence[Slot],
        now: float,
        after: BlockId | None = None,
        hold: bool = False,
    ) -> Inserted:
        made = self._core.insert(namespace, labels, tier, slots, now, after, hold)
        return Inserted(*cast("tuple[Sequence[BlockId], Sequence[Slot], int]", made))

    # -- requests ---------------------------------------------------------------------------------

    def on_request(self, namespace: bytes, labels: Sequence[Label], now: float) -> None:
        self._core.asked(namespace, labels, now)

    def on_state(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        num_before: int,
        front: BlockId,
        at_end: bool,
        now: float,
    ) -> None:
        self._core.used_state(namespace, labels, num_before, front, at_end, now)

    def retain(
        self, namespace: bytes, labels: Sequence[Label], block_hint: BlockHint, now: float
    ) -> None:
        self._core.retain(namespace, labels, block_hint, now)

    def admit(
        self,
        blocks: Sequence[BlockId],
        tier: str,
        num_free: int,
        least_chance: float = 0.0,
    ) -> Sequence[BlockId]:
        admitted = self._core.admit(blocks, tier, num_free, least_chance)
        return cast("Sequence[BlockId]", admitted)

    # -- use --------------------------------------------------------------------------------------

    def touch(self, blocks: Iterable[BlockId], now: float) -> None:
        self._core.touch(blocks, now)

    # -- eviction ---------------------------------------------------------------------------------

    def drop(self, tier: str, num_blocks: int) -> Sequence[Slot]:
        return cast("Sequence[Slot]", self._core.drop(tier, num_blocks))

    # -- for tests and diagnosis ------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        made: dict[int, Node] = {}
        for block, parent, label, num_uses, places in self._core.dump():
            above = None if parent is None else made[parent]
            node = Node(BlockId(block), above, label, 0)
            node.num_uses = num_uses
            if above is not None:
                above.children[label] = node
                node.residencies = tuple(
                    Residency(cast("State", state), Slot(slot), leases, num_children)
                    for state, slot, leases, num_children in places
                )
            made[block] = node
        return [node for node in made.values() if node.parent is not None]

    def describe(self) -> str:
        return f"native, {', '.join(sorted(set(self._policies)))}"
