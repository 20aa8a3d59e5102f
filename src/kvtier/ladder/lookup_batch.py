"""Look-ups of a prompt's blocks in storage, piece by piece.

The first piece is small, since storage may have nothing; pieces grow while all are found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from kvtier.index import PromptIndex
from kvtier.keys import keys_along
from kvtier.types import BlockId, BlockKey, Label

FIRST_KEYS = 64
GROWTH = 16
MOST_KEYS = 4096
"""Largest number of keys in a look-up. A look-up begins with few keys, since storage may have none
of them, and grows while all are found. Hashing 4,096 keys takes 2 ms."""

Adopt = Callable[[Sequence[BlockId]], object]
"""Called with blocks that were found."""


class Lookup(ABC):
    """Look-up of a prompt's blocks in ``storage``, one per key."""

    storage: str
    keys: Sequence[BlockKey]

    @property
    def name(self) -> BlockKey:
        """Key by which the look-up is known; the next batch of the same name continues it."""
        return self.keys[0]

    @property
    def lacked(self) -> BlockKey | None:
        """Key of the first block that earlier batches of the prompt did not find."""
        return None

    @abstractmethod
    def take_in(
        self, there: Sequence[int], adopt: Adopt, is_known: Callable[[BlockId], bool]
    ) -> Lookup | None:
        """Adopt the blocks found. Return the next batch of the prompt, if there is one.

        Args:
            there: positions of the keys that storage has.
            adopt: called with the blocks found.
            is_known: whether the index still knows a block.
        """


@dataclass(frozen=True, slots=True)
class PathLookup(Lookup):
    """Look-up of a prompt in a trie, from its block ``first`` on.

    Attributes:
        storage: the tier.
        paths: the trie.
        namespace: the prompt's namespace.
        labels: the labels of all its blocks.
        first: position of the first block of this batch.
        above: the block before it; None if there is none.
        before: the key of that block, or the namespace.
        keys: keys of this batch.
    """

    storage: str
    paths: PromptIndex
    namespace: bytes
    labels: Sequence[Label]
    first: int
    above: BlockId | None
    before: bytes
    keys: Sequence[BlockKey] = ()

    @property
    def num_left(self) -> int:
        """Number of blocks behind this batch."""
        return len(self.labels) - self.first - len(self.keys)

    def next(self, above: BlockId | None, num_keys: int) -> PathLookup:
        """Return the next batch of the prompt, of ``num_keys`` blocks, behind block ``above``."""
        first = self.first + len(self.keys)
        before = self.keys[-1] if self.keys else self.before
        keys = keys_along(self.namespace, self.labels, first, num_keys, before)
        return replace(self, first=first, above=above, before=before, keys=keys)

    def take_in(
        self, there: Sequence[int], adopt: Adopt, is_known: Callable[[BlockId], bool]
    ) -> PathLookup | None:
        """Adopt the blocks found, also those behind a gap."""
        if not there:
            return None
        num = there[-1] + 1
        path = self._path(num, is_known)
        self.paths.set_keys(path, self.keys[:num])
        adopt(path if len(there) == num else [path[at] for at in there])
        if len(there) < len(self.keys) or not self.num_left:
            return None
        return self.next(path[-1], min(MOST_KEYS, GROWTH * len(there)))

    def _path(self, num: int, is_known: Callable[[BlockId], bool]) -> Sequence[BlockId]:
        """Return the first ``num`` blocks of this batch, added to the trie if needed.

        The index may have forgotten the blocks before them meanwhile.
        """
        if self.above is None or is_known(self.above):
            rest = self.labels[self.first : self.first + num]
            return self.paths.extend(self.namespace, rest, self.above)
        return self.paths.extend(self.namespace, self.labels[: self.first + num])[self.first :]


@dataclass(frozen=True, slots=True)
class KeyLookup(Lookup):
    """Look-up of blocks by an engine's own keys: ``wanted``, from ``first`` on.

    Attributes:
        storage: the tier.
        wanted: the engine's keys of all blocks of the prompt.
        names: return the keys' names in storage.
        make: add the keys' blocks to the index, and return the blocks.
        first: position of the first block of this batch.
        keys: names of this batch in storage.
    """

    storage: str
    wanted: Sequence[bytes]
    names: Callable[[Sequence[bytes]], Sequence[BlockKey]]
    make: Callable[[Sequence[bytes]], Sequence[BlockId]]
    first: int = 0
    keys: Sequence[BlockKey] = ()

    def next(self, num_keys: int) -> Self:
        """Return the next batch of the prompt, of ``num_keys`` blocks."""
        first = self.first + len(self.keys)
        return replace(self, first=first, keys=self.names(self.wanted[first : first + num_keys]))

    def take_in(
        self, there: Sequence[int], adopt: Adopt, is_known: Callable[[BlockId], bool]
    ) -> Self | None:
        if there:
            adopt(self.make([self.wanted[self.first + at] for at in there]))
        if self.first + len(self.keys) == len(self.wanted) or not self._goes_on(there):
            return None
        return self._after(there).next(min(MOST_KEYS, GROWTH * len(self.keys)))

    def _goes_on(self, there: Sequence[int]) -> bool:
        """Whether to look up the next batch: not behind a gap."""
        return len(there) == len(self.keys)

    def _after(self, there: Sequence[int]) -> Self:
        return self


@dataclass(frozen=True, slots=True)
class GapsLookup(KeyLookup):
    """Like ``KeyLookup``, for prompts whose blocks are of use behind a missing one, too.

    missing: the first block not found in earlier batches. All later batches share it as their name.
    """

    missing: BlockKey | None = None

    @property
    def name(self) -> BlockKey:
        return self.missing or self.keys[0]

    @property
    def lacked(self) -> BlockKey | None:
        return self.missing

    def _goes_on(self, there: Sequence[int]) -> bool:
        return True

    def _after(self, there: Sequence[int]) -> Self:
        are_there = set(there)
        missing = (key for at, key in enumerate(self.keys) if at not in are_there)
        return replace(self, missing=self.missing or next(missing, None))
