"""Prompt index in pure Python: fall-back, test oracle, and host of policies written in Python.

A trie holds the known prefixes, a residency per column the state of each block, and a policy per
column chooses the victims.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice

from kvtier.hints import Said, check_said
from kvtier.index.block_index import check_slot, check_time
from kvtier.index.groups import ALL, ReuseRule, columns_of
from kvtier.index.matches import find_cuts, find_prefix
from kvtier.index.policies.base import EvictionPolicy
from kvtier.index.prompt_index import PromptIndex
from kvtier.index.residency import Residency, State
from kvtier.index.trie import Node, Trie, prefix_name
from kvtier.keys import next_key
from kvtier.types import (
    AnyColumn,
    BlockId,
    BlockKey,
    BlockName,
    Column,
    GroupMatch,
    Label,
    Match,
    Slot,
)


class PythonIndex(PromptIndex):
    """Prompt index that keeps blocks as Python objects.

    policies: policy of each column, the first group's tiers first, fastest tier first.
    rules: rule of each group.
    because: why this index is used.
    """

    def __init__(
        self,
        policies: Mapping[AnyColumn, EvictionPolicy],
        rules: Sequence[ReuseRule] = (ALL,),
        because: str = "asked for",
    ) -> None:
        self.rules = tuple(rules)
        self.tiers, self.columns = columns_of(policies, len(self.rules))
        self._because = because
        self._position: dict[AnyColumn, int] = {}
        for position, column in enumerate(self.columns):
            group, tier = divmod(position, len(self.tiers))
            self._position[column] = self._position[Column(self.tiers[tier], group)] = position
        self._rule_of = [rule for rule in self.rules for _ in self.tiers]
        self._policies = tuple(policies[column] for column in self.columns)
        self._trie = Trie(len(self.columns))
        for column, policy in zip(self.columns, self._policies, strict=True):
            policy.see(partial(self._residency, column=column))
        self._num_held = [0] * len(self.columns)
        self._num_idle = [0] * len(self.columns)

    # -- queries ----------------------------------------------------------------------------------

    def match(self, namespace: bytes, labels: Sequence[Label]) -> Match:
        assert self.rules == (ALL,), "ask match_groups: what can be reused is no prefix"
        return find_prefix(self._trie.walk(namespace, labels), self.tiers, len(labels))

    def match_groups(self, namespace: bytes, labels: Sequence[Label]) -> GroupMatch:
        nodes = self._trie.walk(namespace, labels)
        return find_cuts(nodes, self.tiers, self.rules, len(labels))

    def state(self, block: BlockId, column: AnyColumn) -> State:
        node = self._trie.nodes.get(block)
        return node.residencies[self._position[column]].state if node else State.ABSENT

    def states(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        column: AnyColumn,
        after: BlockId | None = None,
    ) -> list[State]:
        position = self._position[column]
        nodes = self._trie.walk(namespace, labels, after)
        return [node.residencies[position].state for node in nodes]

    def slots(self, blocks: Iterable[BlockId], column: AnyColumn) -> list[Slot]:
        return [self._residency(block, column).slot for block in blocks]

    def prefixes(self, blocks: Iterable[BlockId], column: AnyColumn) -> list[BlockId]:
        below, position = set(blocks), self._position[column]
        found: set[BlockId] = set()
        for block in below:
            node = self._trie.nodes[block].parent
            while node is not None and node.parent is not None and node.block not in below:
                if node.residencies[position].state is State.READY:
                    found.add(node.block)
                    break
                node = node.parent
        return sorted(found)

    def num_uses(self, block: BlockId) -> int:
        return self._trie.nodes[block].num_uses

    def num_leases(self, block: BlockId, column: AnyColumn) -> int:
        return self._trie.nodes[block].residencies[self._position[column]].leases

    def num_evictable(self, column: AnyColumn) -> int:
        return self._num_idle[self._position[column]]

    def num_held(self, column: AnyColumn) -> int:
        return self._num_held[self._position[column]]

    def key(self, block: BlockId) -> BlockKey:
        chain: list[Node] = []
        node: Node | None = self._trie.nodes[block]
        while node is not None and node.key is None and node.parent is not None:
            chain.append(node)
            node = node.parent
        assert node is not None
        previous: bytes = node.label if node.parent is None else node.key or b""
        for node in reversed(chain):
            node.key = next_key(previous, node.label)
            previous = node.key
        return BlockKey(previous)

    def name(self, block: BlockId) -> BlockName:
        depth, node = -1, self._trie.nodes[block]
        while node.parent is not None:
            depth, node = depth + 1, node.parent
        return BlockName(node.label, depth, self.key(block))

    def set_keys(self, blocks: Sequence[BlockId], keys: Sequence[BlockKey]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            self._trie.nodes[block].key = key

    @property
    def num_namespaces(self) -> int:
        return self._trie.num_roots

    def __len__(self) -> int:
        return len(self._trie)

    # -- writing: absent -> writing -> ready ------------------------------------------------------

    def extend(
        self, namespace: bytes, labels: Sequence[Label], after: BlockId | None = None
    ) -> list[BlockId]:
        return [node.block for node in self._trie.extend(namespace, labels, after)]

    def begin_write(self, block: BlockId, column: AnyColumn, slot: Slot) -> None:
        check_slot(slot)
        residency = self._residency(block, column)
        residency.move(State.WRITING)
        residency.slot = slot
        residency.was_used = False
        self._count(block, column, +1)
        self._enter(block, column)

    def commit(self, block: BlockId, column: AnyColumn, now: float) -> None:
        check_time(now)
        residency = self._residency(block, column)
        residency.move(State.READY)
        self._num_idle[self._position[column]] += residency.leases == 0
        if not residency.was_used:
            self._policies[self._position[column]].touch(block, now)
        self._review(block, column)

    def abort(self, block: BlockId, column: AnyColumn) -> Slot:
        return self._leave(block, column)

    # -- admission --------------------------------------------------------------------------------

    def on_request(self, namespace: bytes, labels: Sequence[Label], now: float) -> None:
        check_time(now)
        for policy, path, found in self._prompt(namespace, labels):
            policy.on_request(path, found, now)

    def retain(self, namespace: bytes, labels: Sequence[Label], said: Said, now: float) -> None:
        check_time(now)
        check_said(said)
        for policy, path, found in self._prompt(namespace, labels):
            policy.retain(path, found, said, now)

    def _prompt(
        self, namespace: bytes, labels: Sequence[Label]
    ) -> Iterator[tuple[EvictionPolicy, list[int], list[BlockId]]]:
        """Yield, for each policy that knows prompts, the prompt's prefix names and found blocks."""
        known = list(self._trie.walk(namespace, labels))
        path = [node.name for node in known]
        name = path[-1] if path else prefix_name(0, Label(namespace))
        unknown = labels[len(path) :]
        path += islice(accumulate(unknown, prefix_name, initial=name), 1, None)
        for position, policy in enumerate(self._policies):
            if not policy.knows_prompts or not path:
                continue
            there = [node.residencies[position].is_there for node in known]
            num_found = [*there, False].index(False)
            yield policy, path, [node.block for node in known[:num_found]]

    def admit(
        self,
        blocks: Sequence[BlockId],
        column: AnyColumn,
        num_free: int,
        least_chance: float = 0.0,
    ) -> list[BlockId]:
        names = [self._trie.nodes[block].name for block in blocks]
        policy = self._policies[self._position[column]]
        return [blocks[at] for at in policy.admit(names, max(0, num_free), least_chance)]

    def set_recompute_slope(self, at_blocks: float) -> None:
        for policy in self._policies:
            policy.set_recompute_slope(at_blocks)

    def set_room(self, column: AnyColumn, num_blocks: int) -> None:
        self._policies[self._position[column]].set_room(num_blocks)

    # -- use --------------------------------------------------------------------------------------

    def touch(self, blocks: Iterable[BlockId], now: float) -> None:
        check_time(now)
        path = list(blocks)
        used = [rule.needed(len(path)) for rule in self._rule_of]
        for at, block in enumerate(path):
            node = self._trie.nodes[block]
            node.num_uses += 1
            for position, residency in enumerate(node.residencies):
                if residency.state is not State.ABSENT and at in used[position]:
                    residency.was_used = True
                    self._policies[position].touch(block, now)

    def lease(self, blocks: Iterable[BlockId], column: AnyColumn) -> None:
        for block in blocks:
            residency = self._residency(block, column)
            assert residency.state in (State.READY, State.WRITING), f"lease on {residency}"
            residency.leases += 1
            if residency.leases == 1:
                self._num_idle[self._position[column]] -= residency.state is State.READY
                self._review(block, column)

    def release(self, blocks: Iterable[BlockId], column: AnyColumn) -> None:
        for block in blocks:
            residency = self._residency(block, column)
            assert residency.leases > 0, "released more often than leased"
            residency.leases -= 1
            if residency.leases == 0:
                self._num_idle[self._position[column]] += residency.state is State.READY
                self._review(block, column)

    # -- eviction: ready -> evicting -> absent ----------------------------------------------------

    def evict(self, column: AnyColumn, num_blocks: int) -> list[BlockId]:
        position = self._position[column]
        policy = self._policies[position]
        policy.begin_evicting()
        chosen: list[BlockId] = []
        while len(chosen) < num_blocks and (block := policy.victim()) is not None:
            self._residency(block, column).move(State.EVICTING)
            policy.discard(block)
            self._num_idle[position] -= 1
            self._count_in_parent(block, column, -1)
            chosen.append(block)
        return chosen

    def forget(self, block: BlockId, column: AnyColumn) -> Slot:
        return self._leave(block, column)

    def keep(self, block: BlockId, column: AnyColumn) -> None:
        self._residency(block, column).move(State.READY)
        self._num_idle[self._position[column]] += 1
        self._count_in_parent(block, column, +1)
        self._enter(block, column)
        self._review(block, column)

    def lose(self, block: BlockId, column: AnyColumn) -> Slot | None:
        residency = self._residency(block, column)
        if residency.leases:
            return None
        residency.move(State.EVICTING)
        self._policies[self._position[column]].discard(block)
        self._num_idle[self._position[column]] -= 1
        self._count_in_parent(block, column, -1)
        return self._leave(block, column)

    # -- for tests and diagnosis ------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        return list(self._trie.nodes.values())

    def describe(self) -> str:
        return f"Python, {self._because}"

    # -- bookkeeping ------------------------------------------------------------------------------

    def _residency(self, block: BlockId, column: AnyColumn) -> Residency:
        return self._trie.nodes[block].residencies[self._position[column]]

    def _leave(self, block: BlockId, column: AnyColumn) -> Slot:
        node, position = self._trie.nodes[block], self._position[column]
        residency = node.residencies[position]
        before = residency.state
        slot, residency.slot = residency.slot, Slot(-1)
        residency.move(State.ABSENT)
        self._num_held[position] -= 1
        self._num_idle[position] -= before is State.READY
        self._policies[position].forget(block)
        if before is not State.EVICTING:
            self._count_in_parent(block, column, -1)
        self._trie.prune(node)
        return slot

    def _enter(self, block: BlockId, column: AnyColumn) -> None:
        """Report to the policy that the block entered ``column``."""
        node, position = self._trie.nodes[block], self._position[column]
        if not self._policies[position].knows_prompts:
            return
        at, above = -1, node.parent
        while above is not None:
            at, above = at + 1, above.parent
        above, parent = node.parent, None
        if above is not None and above.residencies and above.residencies[position].is_there:
            parent = above.block
        self._policies[position].entered(block, node.name, parent, at)

    def _count(self, block: BlockId, column: AnyColumn, change: int) -> None:
        self._num_held[self._position[column]] += change
        self._count_in_parent(block, column, change)

    def _count_in_parent(self, block: BlockId, column: AnyColumn, change: int) -> None:
        """Update the number of children in the parent, if children need their parent."""
        position = self._position[column]
        parent = self._trie.nodes[block].parent
        if self._rule_of[position].needs_all and parent is not None and parent.residencies:
            parent.residencies[position].num_children += change
            self._review(parent.block, column)

    def _review(self, block: BlockId, column: AnyColumn) -> None:
        """Report to the policy whether the block may be evicted from ``column`` now."""
        policy = self._policies[self._position[column]]
        if self._residency(block, column).evictable:
            policy.add(block)
        else:
            policy.discard(block)

    def check_invariants(self) -> None:
        for position, column in enumerate(self.columns):
            held: list[Slot] = []
            idle = 0
            candidates: set[BlockId] = set()
            for node in self._trie.nodes.values():
                residency = node.residencies[position]
                children = sum(
                    child.residencies[position].state not in (State.ABSENT, State.EVICTING)
                    for child in node.children.values()
                    if self._rule_of[position].needs_all
                )
                assert residency.num_children == children, f"{column}: children miscounted"
                assert residency.leases >= 0, f"{column}: leases below zero"
                if residency.state is State.ABSENT:
                    assert residency.leases == 0, f"{column}: a block that is not there is leased"
                    continue
                held.append(residency.slot)
                idle += residency.state is State.READY and residency.leases == 0
                if residency.evictable:
                    candidates.add(node.block)
            assert len(held) == len(set(held)), f"{column}: two blocks share a slot"
            assert len(held) == self._num_held[position], f"{column}: blocks miscounted"
            assert idle == self._num_idle[position], f"{column}: idle blocks miscounted"
            assert candidates == self._policies[position].candidates(), (
                f"{column}: candidates differ"
            )
            self._policies[position].check_invariants()
        for node in self._trie.nodes.values():
            assert node.children or node.is_cached, "a node that nothing needs was not pruned"
            assert node.parent is not None, "a block without a parent"
            assert node.parent.children.get(node.label) is node, "a block its parent does not know"
