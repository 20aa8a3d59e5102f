"""Look-ups of a prompt's blocks in storage, batch by batch.

The first batch is small, since storage may have nothing; batches grow while all blocks are found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtier.core.types import BlockId, BlockKey

FIRST_KEYS = 64
GROWTH = 16
MAX_KEYS = 4096
"""Largest number of keys in a look-up. A look-up begins with few keys, since storage may have none
of them, and grows while all are found. Hashing 4,096 keys takes 2 ms."""

Adopt = Callable[[Sequence[BlockId]], object]
"""Called with blocks that were found."""


class WantedBlocks(ABC):
    """Blocks of one prompt, in its order, that storage may have and the index may not know."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def names(self, first: int, num: int, before: BlockKey | None) -> Sequence[BlockKey]:
        """Return the names in storage of ``num`` blocks from ``first`` on, fewer at the end.

        before: name of the block in front of ``first``; None at the start.
        """

    @abstractmethod
    def make(
        self, first: int, there: Sequence[int], names: Sequence[BlockKey]
    ) -> Sequence[BlockId]:
        """Add blocks that storage has to the index, and return them.

        Args:
            first: position of the batch.
            there: positions of the blocks in the batch, ascending.
            names: names of the whole batch.
        """


@dataclass(frozen=True, slots=True)
class Lookup:
    """Look-up of one batch of a prompt's blocks.

    Attributes:
        storage: the tier.
        wanted: blocks of the prompt.
        has_gaps: whether blocks behind a missing one may be of use.
        first: position of the batch's first block.
        keys: names of the batch's blocks in storage.
        missing: first block not found in earlier batches. All later batches share it as their name.
    """

    storage: str
    wanted: WantedBlocks
    has_gaps: bool
    first: int = 0
    keys: Sequence[BlockKey] = ()
    missing: BlockKey | None = None

    @property
    def name(self) -> BlockKey:
        """Key by which the look-up is known; the next batch of the same name continues it."""
        return self.missing or self.keys[0]

    def next(self, num_keys: int) -> Lookup:
        """Return the next batch of the prompt, of ``num_keys`` blocks."""
        first = self.first + len(self.keys)
        names = self.wanted.names(first, num_keys, self.keys[-1] if self.keys else None)
        return replace(self, first=first, keys=names)

    def take_in(self, there: Sequence[int], adopt: Adopt) -> Lookup | None:
        """Adopt the blocks found, also those behind a gap. Return the next batch, if any.

        Args:
            there: positions of the keys that storage has.
            adopt: called with the blocks found.
        """
        if there:
            adopt(self.wanted.make(self.first, there, self.keys))
        are_all_there = len(there) == len(self.keys)
        is_last = self.first + len(self.keys) == len(self.wanted)
        if is_last or not (are_all_there or self.has_gaps):
            return None
        missing = self.missing
        if missing is None and not are_all_there:
            found = set(there)
            missing = next(key for at, key in enumerate(self.keys) if at not in found)
        return replace(self, missing=missing).next(min(MAX_KEYS, GROWTH * len(self.keys)))
