"""Look-ups in storage of a prompt's blocks by its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.cache.ladder import Ladder, WantedBlocks
from kvtier.core.keys import keys_along
from kvtier.core.types import BlockId, BlockKey, Label
from kvtier.index import PromptIndex, State


def begin_lookup(
    ladder: Ladder, index: PromptIndex, namespace: bytes, labels: Sequence[Label]
) -> bool:
    """Look up a prompt in every storage tier that may have more of it than the index knows.

    On return the index knows the blocks of storage that answers at once. Returns whether the prompt
    should wait for another answer.
    """
    is_worth_waiting = False
    for storage in ladder.unindexed():
        known = index.match(namespace, labels).blocks
        if len(known) == len(labels):
            break
        wanted = _WantedLabels(index, namespace, labels[:], known)
        pending = ladder.lookup_storage(storage, wanted, num_before=len(known))
        is_worth_waiting |= pending is not None
    return is_worth_waiting


class _WantedLabels(WantedBlocks):
    """Blocks of a prompt behind the ones that the index knows.

    Args:
        index: blocks by their labels.
        namespace: the prompt's namespace.
        labels: labels of all its blocks.
        known: its first blocks.
    """

    def __init__(
        self,
        index: PromptIndex,
        namespace: bytes,
        labels: Sequence[Label],
        known: Sequence[BlockId],
    ) -> None:
        self._index, self._namespace, self._labels = index, namespace, labels
        self._num_known = len(known)
        self._last = known[-1] if known else None  # block in front of the next batch
        self._before = namespace if self._last is None else index.key(self._last)

    def __len__(self) -> int:
        return len(self._labels) - self._num_known

    def names(self, first: int, num: int, before: BlockKey | None) -> Sequence[BlockKey]:
        at = self._num_known + first
        return keys_along(self._namespace, self._labels, at, num, before or self._before)

    def make(
        self, first: int, there: Sequence[int], names: Sequence[BlockKey]
    ) -> Sequence[BlockId]:
        """Add the blocks and those in gaps between them, which later blocks need in the index."""
        num, at = there[-1] + 1, self._num_known + first
        if self._last is None or self._is_known(self._last):
            path = self._index.extend(self._namespace, self._labels[at : at + num], self._last)
        else:  # the index has forgotten the blocks in front meanwhile
            path = self._index.extend(self._namespace, self._labels[: at + num])[at:]
        self._index.set_keys(path, names[:num])
        self._last = path[-1]
        return path if len(there) == num else [path[position] for position in there]

    def _is_known(self, block: BlockId) -> bool:
        tiers = self._index.tiers
        return any(self._index.state(block, tier) is not State.ABSENT for tier in tiers)
