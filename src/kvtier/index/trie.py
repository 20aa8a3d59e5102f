"""Trie of blocks: one node per block, found by (parent, label). Labels are compared in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.core.keys import Labels
from kvtier.core.types import BlockId, BlockKey, Label
from kvtier.index.residency import Residency, State


def prefix_name(before: int, label: Label) -> int:
    """Return the number that identifies a prefix to policies.

    before: number of the prefix without its last block. label: label of the last block.
    """
    return hash((before, label))


class Node:
    """One block: its place in the trie, its residency in each tier, its number of uses."""

    __slots__ = ("block", "children", "key", "label", "name", "num_uses", "parent", "residencies")

    def __init__(self, block: BlockId, parent: Node | None, label: Label, num_tiers: int) -> None:
        self.block = block
        self.parent = parent
        self.label = label
        self.children: dict[Label, Node] = {}
        self.residencies = tuple(Residency() for _ in range(num_tiers))
        self.num_uses = 0
        self.key: BlockKey | None = None
        self.name: int = prefix_name(parent.name if parent is not None else 0, label)

    @property
    def is_cached(self) -> bool:
        """Whether some tier holds the block, or is being filled with it."""
        return any(residency.state is not State.ABSENT for residency in self.residencies)


class BlockNumbers:
    """Allocator of block numbers: a place in the low 32 bits, its number of reuses in the others.

    Freed places are reused last in, first out, as in the native core, so that both assign the same
    numbers.
    """

    def __init__(self) -> None:
        self._free: list[BlockId] = []
        self._num_places = 0

    def take(self) -> BlockId:
        if self._free:
            return self._free.pop()
        self._num_places += 1
        return BlockId(self._num_places - 1)

    def give_back(self, number: BlockId) -> None:
        self._free.append(BlockId(number + (1 << 32)))


class Trie:
    """Blocks in one trie per namespace.

    A node lives while a tier holds its block, or a longer prefix needs it; then ``prune`` removes
    it. The root of a namespace is a node without a block.
    """

    def __init__(self, num_tiers: int) -> None:
        self._num_tiers = num_tiers
        self._numbers = BlockNumbers()
        self._roots: dict[bytes, Node] = {}
        self.nodes: dict[BlockId, Node] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    def walk(
        self, namespace: bytes, labels: Sequence[Label], after: BlockId | None = None
    ) -> Iterator[Node]:
        """Yield the known nodes along ``labels``, up to the first missing one.

        after: block below which the labels begin; None for the root.
        """
        if isinstance(labels, Labels):
            labels.check()
        node = self._roots.get(namespace) if after is None else self.nodes[after]
        for label in labels:
            node = node.children.get(label) if node is not None else None
            if node is None:
                return
            yield node

    def extend(
        self, namespace: bytes, labels: Sequence[Label], after: BlockId | None = None
    ) -> list[Node]:
        """Return the nodes along ``labels``; make missing ones.

        after: block below which the labels begin; None for the root.
        """
        if isinstance(labels, Labels):
            labels.check()
        if not labels:
            return []  # a root without blocks would never be pruned
        labels = list(labels)  # before any change, because reading invalid labels raises
        node = self._roots.get(namespace) if after is None else self.nodes[after]
        if node is None:
            node = self._roots[namespace] = Node(self._numbers.take(), None, namespace, 0)
        path = []
        for label in labels:
            child = node.children.get(label)
            if child is None:
                child = Node(self._numbers.take(), node, label, self._num_tiers)
                node.children[label] = self.nodes[child.block] = child
            path.append(child)
            node = child
        return path

    def prune(self, node: Node) -> None:
        """Remove ``node`` and its ancestors, as far as no tier and no child needs them."""
        while node.parent is not None and not node.children and not node.is_cached:
            parent = node.parent
            del parent.children[node.label]
            del self.nodes[node.block]
            self._numbers.give_back(node.block)
            node = parent
        if node.parent is None and not node.children:
            del self._roots[node.label]
            self._numbers.give_back(node.block)

    @property
    def num_roots(self) -> int:
        return len(self._roots)
