"""The index of the native core: a call per prompt, and no Python object per block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtier._hot import BlockTrie
from kvtier.index.block_index import BlockIndex, Inserted
from kvtier.index.residency import Residency, State
from kvtier.index.trie import Node
from kvtier.keys import Labels, next_key
from kvtier.types import BlockId, BlockKey, BlockName, Label, Match, Slot

_INT64 = np.dtype(np.int64)
_array_over = np.frombuffer


class NativeIndex(BlockIndex):
    """Blocks in an arena of the native core. policies: per tier the name of a native policy."""

    def __init__(self, policies: Mapping[str, str]) -> None:
        assert BlockTrie is not None, "the native core is not there"
        self.tiers = tuple(policies)
        self._policies = tuple(policies.values())
        self._trie = BlockTrie(self.tiers, self._policies, tuple(State), Labels, Match)

    # -- queries ----------------------------------------------------------------------------------

    def match(self, namespace: bytes, labels: Sequence[Label]) -> Match:
        return cast("Match", self._trie.match(namespace, labels))

    def match_slots(
        self, namespace: bytes, labels: Sequence[Label], tier: str
    ) -> npt.NDArray[np.int64]:
        return _array_over(self._trie.match_slots(namespace, labels, tier), _INT64)

    def find(self, namespace: bytes, label: Label) -> tuple[BlockId, tuple[State, ...]] | None:
        return self._trie.find(namespace, label)  # type: ignore[return-value]

    def state(self, block: BlockId, tier: str) -> State:
        return cast("State", self._trie.state(block, tier))

    def states_of(self, blocks: Iterable[BlockId], tier: str) -> list[State]:
        return cast("list[State]", self._trie.states_of(blocks, tier))

    def states(
        self, namespace: bytes, labels: Sequence[Label], tier: str, after: BlockId | None = None
    ) -> list[State]:
        return cast("list[State]", self._trie.states(namespace, labels, tier, after))

    def slots(self, blocks: Iterable[BlockId], tier: str) -> list[Slot]:
        return cast("list[Slot]", self._trie.slots(blocks, tier))

    def prefixes(self, blocks: Iterable[BlockId], tier: str) -> list[BlockId]:
        return cast("list[BlockId]", self._trie.prefixes(blocks, tier))

    def num_uses(self, block: BlockId) -> int:
        return self._trie.num_uses(block)

    def num_leases(self, block: BlockId, tier: str) -> int:
        return self._trie.num_leases(block, tier)

    def labels(self, blocks: Iterable[BlockId]) -> list[bytes]:
        return self._trie.labels(blocks)

    def num_evictable(self, tier: str) -> int:
        return self._trie.num_evictable(tier)

    def num_held(self, tier: str) -> int:
        return self._trie.num_held(tier)

    def key(self, block: BlockId) -> BlockKey:
        previous, blocks, labels = self._trie.missing_keys(block)
        keys: list[BlockKey] = []
        for label in labels:
            previous = next_key(previous, label)
            keys.append(previous)
        self._trie.set_keys(blocks, keys)
        return BlockKey(previous)

    def name(self, block: BlockId) -> BlockName:
        namespace, depth = self._trie.origin(block)
        return BlockName(namespace, depth, self.key(block))

    @property
    def num_namespaces(self) -> int:
        return self._trie.num_namespaces()

    @property
    def num_bytes(self) -> int:
        """Memory of nodes, labels, look-up table and queues, free places included."""
        return self._trie.num_bytes()

    def __len__(self) -> int:
        return len(self._trie)

    # -- writing ----------------------------------------------------------------------------------

    def extend(
        self, namespace: bytes, labels: Sequence[Label], after: BlockId | None = None
    ) -> list[BlockId]:
        return cast("list[BlockId]", self._trie.extend(namespace, labels, after))

    def begin_write(self, block: BlockId, tier: str, slot: Slot) -> None:
        self._trie.begin_write((block,), tier, (slot,))

    def begin_write_all(self, blocks: Iterable[BlockId], tier: str, slots: Iterable[Slot]) -> None:
        self._trie.begin_write(blocks, tier, slots)

    def commit(self, block: BlockId, tier: str, now: float) -> None:
        self._trie.commit((block,), tier, now)

    def commit_all(self, blocks: Iterable[BlockId], tier: str, now: float) -> None:
        self._trie.commit(blocks, tier, now)

    def abort(self, block: BlockId, tier: str) -> Slot:
        return self.abort_all((block,), tier)[0]

    def abort_all(self, blocks: Iterable[BlockId], tier: str) -> list[Slot]:
        return cast("list[Slot]", self._trie.abort(blocks, tier))

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
        made = self._trie.insert(namespace, labels, tier, slots, now, after, hold)
        return Inserted(*cast("tuple[list[BlockId], list[Slot], int]", made))

    # -- use --------------------------------------------------------------------------------------

    def touch(self, blocks: Iterable[BlockId], now: float) -> None:
        self._trie.touch(blocks, now)

    def lease(self, blocks: Iterable[BlockId], tier: str) -> None:
        self._trie.lease(blocks, tier)

    def release(self, blocks: Iterable[BlockId], tier: str) -> None:
        self._trie.release(blocks, tier)

    # -- eviction ---------------------------------------------------------------------------------

    def evict(self, tier: str, num_blocks: int) -> list[BlockId]:
        return cast("list[BlockId]", self._trie.evict(tier, num_blocks))

    def forget(self, block: BlockId, tier: str) -> Slot:
        return self.forget_all((block,), tier)[0]

    def forget_all(self, blocks: Iterable[BlockId], tier: str) -> list[Slot]:
        return cast("list[Slot]", self._trie.forget(blocks, tier))

    def drop(self, tier: str, num_blocks: int) -> list[Slot]:
        return cast("list[Slot]", self._trie.drop(tier, num_blocks))

    def keep(self, block: BlockId, tier: str) -> None:
        self._trie.keep((block,), tier)

    def lose(self, block: BlockId, tier: str) -> Slot | None:
        return cast("Slot | None", self._trie.lose(block, tier))

    # -- for tests and doctors --------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        made: dict[int, Node] = {}
        for block, parent, label, num_uses, places in self._trie.dump():
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

    def check_invariants(self) -> None:
        self._trie.check_invariants()
