"""Look-ups in storage by an engine's keys, for blocks that the index does not know."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from kvtier.index import KeyIndex
from kvtier.keys import child_keys
from kvtier.ladder import Ladder, PendingLookup
from kvtier.types import NO_BLOCK, BlockId, BlockKey

FIRST_PIECE = 16
"""Keys of a prompt's first look-up in storage. Each further look-up is four times as long, so that
few keys are hashed in vain if storage has none of a prompt's blocks."""


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
        """Adopt recovered blocks; see ``LocalBlockCache.adopt_recovered``."""
        namespace = self._namespace()
        if not namespace or not self._ladder.storage_lookup.has_unfound_at_once:
            return []
        wanted = list(dict.fromkeys(keys))
        blocks, _ = self._index.find_all(wanted)
        unknown = [key for key, block in zip(wanted, blocks, strict=True) if block == NO_BLOCK]
        adopted: list[bytes] = []
        for piece in _growing(unknown) if stops_at_gap else [unknown] if unknown else []:
            there = self._adopt(namespace, piece)
            adopted += there
            if len(there) < len(piece):
                break
        return adopted

    def names(self, keys: Sequence[bytes]) -> list[BlockKey]:
        """Return the names of blocks in storage. The namespace must be known."""
        return child_keys(self._namespace(), keys)

    def _adopt(self, namespace: bytes, unknown: Sequence[bytes]) -> list[bytes]:
        found: set[bytes] = set()

        def make(positions: Sequence[int]) -> Sequence[BlockId]:
            there = [unknown[at] for at in positions]
            found.update(there)
            return self._index.make(there)

        num = self._ladder.storage_lookup.adopt_recovered(child_keys(namespace, unknown), make)
        adopted = [key for key in unknown if key in found]
        if num < len(adopted):  # there was no room for all of them
            blocks, _ = self._index.find_all(adopted)
            pairs = zip(adopted, blocks, strict=True)
            adopted = [key for key, block in pairs if block != NO_BLOCK]
        return adopted

    @property
    def has_to_ask(self) -> bool:
        """Whether some storage does not answer look-ups at once."""
        return bool(self._namespace()) and self._ladder.storage_lookup.has_to_ask

    def begin(self, keys: Sequence[bytes], has_gaps: bool) -> list[PendingLookup]:
        """Look up unknown blocks of one prompt, in its order, in storage that answers later.

        Returns the look-ups that are worth waiting for.

        has_gaps: see ``LocalBlockCache.lookup``.
        """
        names = partial(child_keys, self._namespace())
        return self._ladder.storage_lookup.begin_by_keys(keys, names, self._index.make, has_gaps)


def _growing(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield keys in pieces, each four times as long as the one before."""
    at, num = 0, FIRST_PIECE
    while at < len(keys):
        yield keys[at : at + num]
        at, num = at + num, 4 * num
