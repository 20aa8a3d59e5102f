"""Deletion of prompts from every tier of a cache, and pins that keep prompts in host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtier.cache.ladder import Ladder
from kvtier.cache.transfer import LocalMover
from kvtier.core.keys import next_keys
from kvtier.core.types import HOST, NO_BLOCK, BlockId, BlockKey, Label, keys_of
from kvtier.index import PromptIndex, State
from kvtier.index.trie import Node
from kvtier.tiers import StorageTier

PINNED_SHARE = 0.5
"""Largest share of host memory that pins may hold."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """A deletion that has begun.

    Attributes:
        blocks: the blocks that the index knew.
        names: keys of these blocks, and of others in storage.
    """

    blocks: frozenset[BlockId]
    names: Sequence[BlockKey]

    @classmethod
    def joined(cls, deletions: Sequence[Deletion]) -> Deletion:
        """Return several deletions as one."""
        names = [name for deletion in deletions for name in deletion.names]
        return cls(frozenset().union(*(deletion.blocks for deletion in deletions)), names)


class PromptDeletion:
    """Deletes blocks from every tier, from storage permanently. Owned by the cache's thread.

    Attributes:
        branch: labels of blocks that may follow every ``grain`` blocks of a prompt; they belong to
            the prompt.
        grain: see ``branch``.
    """

    branch: Sequence[Label] = ()
    grain = 1

    def __init__(
        self,
        index: PromptIndex,
        ladder: Ladder,
        mover: LocalMover,
        storages: Mapping[str, StorageTier],
    ) -> None:
        self._index = index
        self._ladder = ladder
        self._mover = mover
        self._storages = storages

    def delete(self, namespace: bytes, labels: Sequence[Label]) -> Deletion:
        """Delete a prompt's blocks. Nothing finds them from now on."""
        num_known = max(
            len(self._index.states(namespace, labels, tier)) for tier in self._index.tiers
        )
        known = self._index.extend(namespace, labels[:num_known])
        names = list(next_keys(namespace, labels))
        blocks = [*known, *[NO_BLOCK] * (len(names) - len(known))]
        for at in range(self.grain, len(labels) + 1, self.grain) if self.branch else ():
            below = self._known_below(namespace, blocks[at - 1])
            blocks += [*below, *[NO_BLOCK] * (len(self.branch) - len(below))]
            names += next_keys(names[at - 1], self.branch)
        self._ladder.delete(names, blocks)
        return Deletion(frozenset(blocks) - {NO_BLOCK}, names)

    def _known_below(self, namespace: bytes, block: BlockId) -> Sequence[BlockId]:
        """Return the known blocks of a branch below ``block``."""
        if block == NO_BLOCK:
            return []
        num_known = len(self._index.states(namespace, self.branch, self._index.tiers[0], block))
        return self._index.extend(namespace, self.branch[:num_known], block)

    def delete_all(self, is_meant: Callable[[bytes], bool]) -> Deletion:
        """Delete all blocks of the namespaces for which ``is_meant`` is true.

        A disk does not know the namespaces of blocks left by an earlier process. Blocks on it that
        belong to no known block of another namespace are deleted, too: they are recomputed.
        Cost: O(all blocks).
        """
        blocks: list[BlockId] = []
        others: list[BlockId] = []
        for node, namespace in _with_namespaces(self._index.nodes()):
            (blocks if is_meant(namespace) else others).append(node.block)
        names = list(keys_of(self._index.names(blocks)))
        self._ladder.delete(names, blocks)
        kept = set(keys_of(self._index.names(others)))
        kept.update(names)
        for name, storage in self._storages.items():
            left = [key for key in storage.lasting_keys() if key not in kept]
            self._mover.drop(name, left, for_good=True)
            names += left
        return Deletion(frozenset(blocks), names)

    def is_complete(self, deletion: Deletion) -> bool:
        """Whether no tier has any of the blocks any more, and storage has confirmed it."""
        if any(block in deletion.blocks for block, _ in self._ladder.lost):
            return False
        return not any(self._mover.owed(name, deletion.names) for name in self._storages)

    def num_kept(self, blocks: Sequence[BlockId]) -> int:
        """Return how many of the first blocks were not deleted."""
        lost = {block for block, _ in self._ladder.lost}
        return next((at for at, block in enumerate(blocks) if block in lost), len(blocks))


def used_by_namespace(index: PromptIndex, tiers: Sequence[str]) -> dict[bytes, dict[str, int]]:
    """Return the number of blocks in each tier by namespace. Cost: O(all blocks)."""
    found: dict[bytes, dict[str, int]] = {}
    for node, namespace in _with_namespaces(index.nodes()):
        used = found.setdefault(namespace, dict.fromkeys(tiers, 0))
        for tier, residency in zip(tiers, node.residencies, strict=True):
            used[tier] += residency.state is State.READY
    return found


def _with_namespaces(nodes: Iterable[Node]) -> Iterator[tuple[Node, bytes]]:
    """Yield each node with the namespace at its root."""
    known: dict[int, bytes] = {}  # by the node's id
    for node in nodes:
        path, above = [], node
        while above.parent is not None and id(above) not in known:
            path.append(above)
            above = above.parent
        found = known[id(above)] if above.parent is not None else bytes(above.label)
        known.update((id(each), found) for each in path)
        yield node, found


class PromptPins:
    """Blocks of prompts that stay in host memory for a time. Owned by the cache's thread.

    num_slots: of host memory; 0 for none.
    """

    def __init__(self, index: PromptIndex, num_slots: int) -> None:
        self._index = index
        self._most = int(PINNED_SHARE * num_slots)
        self._num_made = 0
        self._pins: dict[int, tuple[float, Sequence[BlockId]]] = {}

    def add(self, blocks: Sequence[BlockId], until_s: float) -> tuple[int, int]:
        """Pin the first blocks that are in host memory, as many as pins may hold.

        Returns the number of the pin, 0 if nothing was pinned, and how many blocks were.
        """
        states = self._index.states_of(blocks, HOST) if self._most else []
        ready = next((at for at, s in enumerate(states) if s is not State.READY), len(states))
        pinned = list(blocks[: min(ready, max(0, self._most - self.num_blocks))])
        if not pinned:
            return 0, 0
        self._num_made += 1
        self._index.lease(pinned, HOST)
        self._pins[self._num_made] = until_s, pinned
        return self._num_made, len(pinned)

    @property
    def num_blocks(self) -> int:
        """Number of pinned blocks; one that was pinned twice counts twice."""
        return sum(len(blocks) for _, blocks in self._pins.values())

    def remove(self, number: int) -> bool:
        """End a pin. Return whether there was one of that number."""
        _, blocks = self._pins.pop(number, (0.0, ()))
        self._index.release(blocks, HOST)
        return bool(blocks)

    def expire(self, now_s: float) -> None:
        """End expired pins."""
        for number in [each for each, (until_s, _) in self._pins.items() if until_s <= now_s]:
            self.remove(number)

    def forget(self, deleted: Collection[BlockId]) -> None:
        """End the pins of which a block is deleted."""
        for number, (_, blocks) in list(self._pins.items()):
            if not set(deleted).isdisjoint(blocks):
                self.remove(number)
