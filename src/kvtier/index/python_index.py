"""Prompt index in pure Python: fall-back, test oracle, and host of policies written in Python.

A trie holds the known prefixes, a residency per tier the state of each block, and a policy per
tier chooses the victims.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice

from kvtier.core.hints import BlockHint, check_block_hint
from kvtier.core.keys import next_key
from kvtier.core.types import (
    BlockId,
    BlockKey,
    BlockName,
    Label,
    Match,
)
from kvtier.index.block_index import check_time
from kvtier.index.policies.base import EvictionPolicy
from kvtier.index.prompt_index import PromptIndex
from kvtier.index.python_blocks import PythonBlocks
from kvtier.index.residency import State
from kvtier.index.trie import Node, Trie, prefix_name


class PythonIndex(PythonBlocks, PromptIndex):
    """Prompt index that keeps blocks as Python objects.

    policies: policy of each tier, fastest tier first.
    because: why this index is used.
    """

    def __init__(self, policies: Mapping[str, EvictionPolicy], because: str = "asked for") -> None:
        super().__init__(tuple(policies))
        self._policies = tuple(policies.values())
        self._because = because
        self._trie = Trie(len(self.tiers))
        for tier, policy in zip(self.tiers, self._policies, strict=True):
            policy.see(partial(self._residency, tier=tier))

    # -- queries ----------------------------------------------------------------------------------

    def match(self, namespace: bytes, labels: Sequence[Label]) -> Match:
        blocks: list[BlockId] = []
        tiers: list[str] = []
        in_flight: list[bool] = []
        for node in self._trie.walk(namespace, labels):
            states = [residency.state for residency in node.residencies]
            if State.READY not in states:
                break
            blocks.append(node.block)
            tiers.append(self.tiers[states.index(State.READY)])
            in_flight.append(states[0] is State.WRITING)
        return Match(tuple(blocks), tuple(tiers), tuple(in_flight), len(labels))

    def states(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        tier: str,
        after: BlockId | None = None,
    ) -> list[State]:
        position = self._position(tier)
        nodes = self._trie.walk(namespace, labels, after)
        return [node.residencies[position].state for node in nodes]

    def prefixes(self, blocks: Iterable[BlockId], tier: str) -> list[BlockId]:
        below, position = set(blocks), self._position(tier)
        found: set[BlockId] = set()
        for block in below:
            node = self._trie.nodes[block].parent
            while node is not None and node.parent is not None and node.block not in below:
                if node.residencies[position].state is State.READY:
                    found.add(node.block)
                    break
                node = node.parent
        return sorted(found)

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

    def names(self, blocks: Sequence[BlockId]) -> list[BlockName]:
        return [self._name(block) for block in blocks]

    def _name(self, block: BlockId) -> BlockName:
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

    # -- admission --------------------------------------------------------------------------------

    def on_request(self, namespace: bytes, labels: Sequence[Label], now: float) -> None:
        check_time(now)
        for policy, path, found in self._prompt(namespace, labels):
            policy.on_request(path, found, now)

    def on_state(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        num_before: int,
        front: BlockId,
        at_end: bool,
        now: float,
    ) -> None:
        """Do nothing: its policies order blocks by their use."""

    def retain(
        self, namespace: bytes, labels: Sequence[Label], block_hint: BlockHint, now: float
    ) -> None:
        check_time(now)
        check_block_hint(block_hint)
        for policy, path, found in self._prompt(namespace, labels):
            policy.retain(path, found, block_hint, now)

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
        tier: str,
        num_free: int,
        least_chance: float = 0.0,
    ) -> list[BlockId]:
        names = [self._trie.nodes[block].name for block in blocks]
        policy = self._policies[self._position(tier)]
        return [blocks[at] for at in policy.admit(names, max(0, num_free), least_chance)]

    def set_recompute_slope(self, at_blocks: float) -> None:
        for policy in self._policies:
            policy.set_recompute_slope(at_blocks)

    def set_room(self, tier: str, num_blocks: int) -> None:
        self._policies[self._position(tier)].set_room(num_blocks)

    # -- use --------------------------------------------------------------------------------------

    def touch(self, blocks: Iterable[BlockId], now: float) -> None:
        check_time(now)
        path = list(blocks)
        for block in path:
            node = self._trie.nodes[block]
            node.num_uses += 1
            for position, residency in enumerate(node.residencies):
                if residency.state is not State.ABSENT:
                    residency.was_used = True
                    self._used(block, position, now)

    # -- eviction: ready -> evicting -> absent ----------------------------------------------------

    def evict(self, tier: str, num_blocks: int) -> list[BlockId]:
        position = self._position(tier)
        policy = self._policies[position]
        policy.begin_evicting()
        chosen: list[BlockId] = []
        while len(chosen) < num_blocks and (block := policy.victim()) is not None:
            self._evict(block, position)
            chosen.append(block)
        return chosen

    # -- for tests and diagnosis ------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        return list(self._trie.nodes.values())

    def describe(self) -> str:
        return f"Python, {self._because}"

    # -- bookkeeping ------------------------------------------------------------------------------

    def _find(self, block: BlockId) -> Node | None:
        return self._trie.nodes.get(block)

    def _entries(self) -> Iterable[Node]:
        return self._trie.nodes.values()

    def _used(self, block: BlockId, position: int, now: float) -> None:
        self._policies[position].touch(block, now)

    def _review(self, block: BlockId, position: int) -> None:
        policy = self._policies[position]
        if self._trie.nodes[block].residencies[position].evictable:
            policy.add(block)
        else:
            policy.discard(block)

    def _arrived(self, block: BlockId, position: int) -> None:
        self._count_in_parent(block, position, +1)
        policy, node = self._policies[position], self._trie.nodes[block]
        if not policy.knows_prompts:
            return
        at, above = -1, node.parent
        while above is not None:
            at, above = at + 1, above.parent
        above, parent = node.parent, None
        if above is not None and above.residencies and above.residencies[position].is_there:
            parent = above.block
        policy.entered(block, node.name, parent, at)

    def _leaves(self, block: BlockId, position: int) -> None:
        self._policies[position].discard(block)
        self._count_in_parent(block, position, -1)

    def _left(self, block: BlockId, position: int, before: State) -> None:
        self._policies[position].forget(block)
        if before is not State.EVICTING:
            self._count_in_parent(block, position, -1)
        self._trie.prune(self._trie.nodes[block])

    def _count_in_parent(self, block: BlockId, position: int, change: int) -> None:
        """Update the number of children in the parent."""
        parent = self._trie.nodes[block].parent
        if parent is not None and parent.residencies:
            parent.residencies[position].num_children += change
            self._review(parent.block, position)

    def check_invariants(self) -> None:
        super().check_invariants()
        for position, tier in enumerate(self.tiers):
            candidates: set[BlockId] = set()
            for node in self._trie.nodes.values():
                residency = node.residencies[position]
                children = sum(
                    child.residencies[position].is_there for child in node.children.values()
                )
                assert residency.num_children == children, f"{tier}: children miscounted"
                if residency.evictable:
                    candidates.add(node.block)
            assert candidates == self._policies[position].candidates(), f"{tier}: candidates differ"
            self._policies[position].check_invariants()
        for node in self._trie.nodes.values():
            assert node.children or node.is_cached, "a node that nothing needs was not pruned"
            assert node.parent is not None, "a block without a parent"
            assert node.parent.children.get(node.label) is node, "a block its parent does not know"
