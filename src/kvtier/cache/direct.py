"""Direct reads by an engine's keys, from storage into the engine's own memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.cache.ladder import Ladder
from kvtier.core.types import BlockId, Direct, Slot
from kvtier.index import KeyIndex, State

StorageOf = Callable[[BlockId, Sequence[State]], str | None]
"""Return the storage that a block would be read from, by its state in each tier."""


class DirectReads:
    """Direct reads by the engine's keys. The ladder decides whether a block is read directly."""

    def __init__(self, index: KeyIndex, ladder: Ladder, storage_of: StorageOf) -> None:
        self._index = index
        self._ladder = ladder
        self._storage_of = storage_of

    @property
    def is_for_all(self) -> bool:
        """Whether blocks from every storage tier can be read without room in memory."""
        return self._ladder.reads_all_directly

    def how(self, key: bytes) -> Direct:
        """Return how a block in storage may be read into the engine's memory.

        ON: always directly. AUTO: directly if memory is short of room. OFF: through memory only.
        """
        storage = self._source(key)
        return Direct.OFF if storage is None else self._ladder.direct_mode(storage)

    def _source(self, key: bytes) -> str | None:
        found = self._index.find(key)
        return None if found is None else self._storage_of(*found)

    def read(self, keys: Sequence[bytes], places: Sequence[int]) -> list[str]:
        """Begin to read blocks from storage into the engine's pages.

        The pages must not be used until the reads have ended. The ranks that read report the
        outcome.

        places: destination of each block. Returns the storage tier of each block.
        """
        sources = [self._source(key) for key in keys]
        for storage in dict.fromkeys(sources):
            assert storage is not None, "a block that storage has not"
            at = [position for position, source in enumerate(sources) if source == storage]
            blocks = [found[0] for i in at if (found := self._index.find(keys[i])) is not None]
            self._ladder.read_directly(blocks, storage, [Slot(places[i]) for i in at])
        return [storage for storage in sources if storage is not None]
