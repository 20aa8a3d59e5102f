"""The index of the native core: a call per prompt, and no Python object per block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtier._hot import BlockTrie, Keys
from kvtier.hints import Said
from kvtier.index.groups import ALL, ReuseRule, columns_of
from kvtier.index.prompt_index import Inserted, PromptIndex
from kvtier.index.residency import Residency, State
from kvtier.index.trie import Node
from kvtier.keys import Labels, next_keys
from kvtier.types import (
    AnyColumn,
    BlockId,
    BlockKey,
    BlockName,
    BlockNames,
    GroupMatch,
    Label,
    Match,
    Slot,
)

_INT64 = np.dtype(np.int64)
_array_over = np.frombuffer


class NativeIndex(PromptIndex):
    """Blocks in an arena of the native core.

    policies: per column the name of a native policy, the first group's tiers fastest first. rules:
    per group.
    """

    def __init__(
        self, policies: Mapping[AnyColumn, str], rules: Sequence[ReuseRule] = (ALL,)
    ) -> None:
        assert BlockTrie is not None, "the native core is not there"
        self.rules = tuple(rules)
        self.tiers, self.columns = columns_of(policies, len(self.rules))
        self._policies = tuple(policies[column] for column in self.columns)
        needed = tuple(rule.num_last for rule in self.rules)
        self._trie = BlockTrie(self.tiers, needed, self._policies, tuple(State), Labels, Match)

    # -- queries ----------------------------------------------------------------------------------

    def match(self, namespace: bytes, labels: Sequence[Label]) -> Match:
        return cast("Match", self._trie.match(namespace, labels))

    def match_groups(self, namespace: bytes, labels: Sequence[Label]) -> GroupMatch:
        return GroupMatch(*self._trie.match_groups(namespace, labels))  # type: ignore[arg-type]

    def match_slots(
        self, namespace: bytes, labels: Sequence[Label], column: AnyColumn
    ) -> npt.NDArray[np.int64]:
        return _array_over(self._trie.match_slots(namespace, labels, column), _INT64)

    def state(self, block: BlockId, column: AnyColumn) -> State:
        return cast("State", self._trie.state(block, column))

    def states_of(self, blocks: Iterable[BlockId], column: AnyColumn) -> list[State]:
        return cast("list[State]", self._trie.states_of(blocks, column))

    def states(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        column: AnyColumn,
        after: BlockId | None = None,
    ) -> list[State]:
        return cast("list[State]", self._trie.states(namespace, labels, column, after))

    def slots(self, blocks: Iterable[BlockId], column: AnyColumn) -> Sequence[Slot]:
        return cast("Sequence[Slot]", self._trie.slots(blocks, column))

    def prefixes(self, blocks: Iterable[BlockId], column: AnyColumn) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self._trie.prefixes(blocks, column))

    def num_uses(self, block: BlockId) -> int:
        return self._trie.num_uses(block)

    def num_uses_of(self, blocks: Iterable[BlockId]) -> Sequence[int]:
        return self._trie.num_uses_of(blocks)

    def num_leases(self, block: BlockId, column: AnyColumn) -> int:
        return self._trie.num_leases(block, column)

    def num_evictable(self, column: AnyColumn) -> int:
        return self._trie.num_evictable(column)

    def num_held(self, column: AnyColumn) -> int:
        return self._trie.num_held(column)

    def key(self, block: BlockId) -> BlockKey:
        previous, blocks, labels = self._trie.missing_keys(block)
        keys = next_keys(previous, labels)
        self._trie.set_keys(blocks, keys)
        return keys[-1] if keys else BlockKey(previous)

    def name(self, block: BlockId) -> BlockName:
        namespace, depth = self._trie.origin(block)
        return BlockName(namespace, depth, self.key(block))

    def names(self, blocks: Sequence[BlockId]) -> BlockNames:
        namespaces, depths, keys, are_all_known = self._trie.names(blocks)
        if not are_all_known:
            self.key(blocks[-1])  # mostly the others are in front of it
            *_, keys, are_all_known = self._trie.names(blocks)
        if not are_all_known:
            keys = Keys(map(self.key, blocks))
        return BlockNames(namespaces, depths, cast("Sequence[BlockKey]", keys))

    def set_keys(self, blocks: Sequence[BlockId], keys: Sequence[BlockKey]) -> None:
        self._trie.set_keys(blocks, keys)

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
    ) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self._trie.extend(namespace, labels, after))

    def begin_write(self, block: BlockId, column: AnyColumn, slot: Slot) -> None:
        self._trie.begin_write((block,), column, (slot,))

    def begin_write_all(
        self, blocks: Iterable[BlockId], column: AnyColumn, slots: Iterable[Slot]
    ) -> None:
        self._trie.begin_write(blocks, column, slots)

    def commit(self, block: BlockId, column: AnyColumn, now: float) -> None:
        self._trie.commit((block,), column, now)

    def commit_all(self, blocks: Iterable[BlockId], column: AnyColumn, now: float) -> None:
        self._trie.commit(blocks, column, now)

    def abort(self, block: BlockId, column: AnyColumn) -> Slot:
        return self.abort_all((block,), column)[0]

    def abort_all(self, blocks: Iterable[BlockId], column: AnyColumn) -> Sequence[Slot]:
        return cast("Sequence[Slot]", self._trie.abort(blocks, column))

    def insert(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        column: AnyColumn,
        slots: Sequence[Slot],
        now: float,
        after: BlockId | None = None,
        hold: bool = False,
    ) -> Inserted:
        made = self._trie.insert(namespace, labels, column, slots, now, after, hold)
        return Inserted(*cast("tuple[Sequence[BlockId], Sequence[Slot], int]", made))

    # -- requests ---------------------------------------------------------------------------------

    def asked(self, namespace: bytes, labels: Sequence[Label], now: float) -> None:
        self._trie.asked(namespace, labels, now)

    def retain(self, namespace: bytes, labels: Sequence[Label], said: Said, now: float) -> None:
        self._trie.retain(namespace, labels, said, now)

    def admit(
        self,
        blocks: Sequence[BlockId],
        column: AnyColumn,
        num_free: int,
        least_chance: float = 0.0,
    ) -> Sequence[BlockId]:
        admitted = self._trie.admit(blocks, column, num_free, least_chance)
        return cast("Sequence[BlockId]", admitted)

    def set_doubling(self, at_blocks: float) -> None:
        self._trie.set_doubling(at_blocks)

    def set_room(self, column: AnyColumn, num_blocks: int) -> None:
        self._trie.set_room(column, num_blocks)

    # -- use --------------------------------------------------------------------------------------

    def touch(self, blocks: Iterable[BlockId], now: float) -> None:
        self._trie.touch(blocks, now)

    def lease(self, blocks: Iterable[BlockId], column: AnyColumn) -> None:
        self._trie.lease(blocks, column)

    def release(self, blocks: Iterable[BlockId], column: AnyColumn) -> None:
        self._trie.release(blocks, column)

    # -- eviction ---------------------------------------------------------------------------------

    def evict(self, column: AnyColumn, num_blocks: int) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self._trie.evict(column, num_blocks))

    def forget(self, block: BlockId, column: AnyColumn) -> Slot:
        return self.forget_all((block,), column)[0]

    def forget_all(self, blocks: Iterable[BlockId], column: AnyColumn) -> Sequence[Slot]:
        return cast("Sequence[Slot]", self._trie.forget(blocks, column))

    def drop(self, column: AnyColumn, num_blocks: int) -> Sequence[Slot]:
        return cast("Sequence[Slot]", self._trie.drop(column, num_blocks))

    def keep(self, block: BlockId, column: AnyColumn) -> None:
        self._trie.keep((block,), column)

    def lose(self, block: BlockId, column: AnyColumn) -> Slot | None:
        return cast("Slot | None", self._trie.lose(block, column))

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
