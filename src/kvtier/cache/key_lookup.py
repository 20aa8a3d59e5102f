"""Look-ups in storage by an engine's keys, for blocks that the index does not know."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from kvtier.cache.ladder import Ladder, PendingLookup, WantedBlocks
from kvtier.core.keys import child_keys
from kvtier.core.types import NO_BLOCK, BlockId, BlockKey
from kvtier.index import KeyIndex


class KeyedLookup:
    """Translates an engine's keys to names in storage, and has the ladder look these up.

    Blocks that are found are added to the index. Nothing is looked up while the namespace is
    unknown.

    namespace, knows_storage: see ``LocalBlockCache``.
    """

    def __init__(
        self,
        index: KeyIndex,
        ladder: Ladder,
        namespace: Callable[[], bytes],
        knows_storage: Callable[[], bool],
    ) -> None:
        self._index = index
        self._ladder = ladder
        self._namespace = namespace
        self._knows_storage = knows_storage

    @property
    def is_complete(self) -> bool:
        """Whether storage has recovered all its blocks, or cannot be used."""
        return self._knows_storage() or not (self._ladder.storages and self._namespace())

    def adopt(self, keys: Collection[bytes], stops_at_gap: bool) -> list[bytes]:
        """Adopt recovered blocks; see ``LocalBlockCache.adopt``."""
        storages = self._ladder.unindexed(finds_at_once=True)
        if not self._namespace() or not storages:
            return []
        wanted = list(dict.fromkeys(keys))
        unknown = [key for key, is_known in self._known(wanted) if not is_known]
        if not unknown:
            return []
        for storage in storages:
            self._ladder.lookup_storage(storage, self._wanted(unknown), not stops_at_gap)
        return [key for key, is_known in self._known(unknown) if is_known]

    def _known(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, bool]]:
        """Yield each key, and whether the index knows its block."""
        blocks, _ = self._index.find_all(keys)
        return ((key, block != NO_BLOCK) for key, block in zip(keys, blocks, strict=True))

    def names(self, keys: Sequence[bytes]) -> list[BlockKey]:
        """Return the names of blocks in storage. The namespace must be known."""
        return child_keys(self._namespace(), keys)

    def _wanted(self, keys: Sequence[bytes]) -> WantedBlocks:
        return _WantedKeys(self._index, keys, self._namespace())

    @property
    def has_to_ask(self) -> bool:
        """Whether some storage does not answer look-ups at once."""
        return bool(self._namespace() and self._ladder.unindexed(finds_at_once=False))

    def begin(self, keys: Sequence[bytes], has_gaps: bool) -> list[PendingLookup]:
        """Look up unknown blocks of one prompt, in its order, in storage that answers later.

        Returns the look-ups that are worth waiting for.

        has_gaps: see ``LocalBlockCache.lookup``.
        """
        ladder, wanted = self._ladder, self._wanted(keys)
        storages = ladder.unindexed(finds_at_once=False)
        asked = [ladder.lookup_storage(storage, wanted, has_gaps) for storage in storages]
        return [pending for pending in asked if pending is not None]


class _WantedKeys(WantedBlocks):
    """Blocks of an engine's keys. namespace: the digest that their names in storage begin with."""

    def __init__(self, index: KeyIndex, keys: Sequence[bytes], namespace: bytes) -> None:
        self._index, self._keys, self._namespace = index, keys, namespace

    def __len__(self) -> int:
        return len(self._keys)

    def names(self, first: int, num: int, before: BlockKey | None) -> Sequence[BlockKey]:
        return child_keys(self._namespace, self._keys[first : first + num])

    def make(
        self, first: int, there: Sequence[int], names: Sequence[BlockKey]
    ) -> Sequence[BlockId]:
        return self._index.make([self._keys[first + at] for at in there])
