"""Find blocks in storage by an engine's keys that the index does not know yet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from kvtier.index import KeyIndex
from kvtier.keys import next_key
from kvtier.ladder import Ladder, PendingLookup
from kvtier.types import BlockKey

FIRST_PIECE = 16
"""Keys that storage is asked for at a time: where a prompt is not there, few are hashed in vain.
The next pieces are larger."""


class KeyedLookup:
    """The ladder asks storage; here is what the blocks are called there.

    What is found is known to the index from then on. While nobody knows the namespace nothing is
    looked for, or asked.

    namespace, knows_storage: see ``KeyedCache``.
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
    def may_find(self) -> bool:
        """Whether storage is worth a question for what the index does not know."""
        return bool(self._ladder.storages and self._namespace())

    @property
    def is_complete(self) -> bool:
        """Whether storage has said all that it has."""
        return self._knows_storage()

    def take_in(self, keys: Collection[bytes]) -> int:
        """Adopt blocks of storage that answers at once; return how many."""
        namespace = self._namespace()
        if not namespace or not self._ladder.storage_lookup.has_unfound_at_once:
            return 0
        asked = list(dict.fromkeys(keys))
        blocks, _ = self._index.find_all(asked)
        unknown = [key for key, block in zip(asked, blocks, strict=True) if block is None]
        names = _names(namespace, unknown)
        return self._ladder.storage_lookup.ask_each(
            names, lambda places: self._index.make([unknown[at] for at in places])
        )

    def take_in_along(self, keys: Sequence[bytes]) -> list[bytes]:
        """``take_in``, of one prompt, in growing pieces until nothing more turns up.

        Returns what was asked for.
        """
        asked = 0
        for piece in _growing(keys):
            num = self.take_in(piece)
            asked += len(piece) if num else 0
            if num < len(piece):
                break
        return list(keys[:asked])

    @property
    def has_to_ask(self) -> bool:
        """Whether some storage takes its time to say what it has."""
        return bool(self._namespace()) and self._ladder.storage_lookup.has_to_ask

    def ask_along(self, keys: Sequence[bytes], has_gaps: bool) -> list[PendingLookup]:
        """Ask that storage for blocks of one prompt that are known nowhere, in its order.

        Returns the questions that are worth waiting for. has_gaps: see ``KeyedCache.find_or_ask``.
        """
        names = partial(_names, self._namespace())
        return self._ladder.storage_lookup.ask_along(keys, names, self._index.make, has_gaps)


def _growing(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Pieces, each four times as long as the one before."""
    at, num = 0, FIRST_PIECE
    while at < len(keys):
        yield keys[at : at + num]
        at, num = at + num, 4 * num


def _names(namespace: bytes, keys: Sequence[bytes]) -> list[BlockKey]:
    """Return the names of blocks in storage."""
    return [next_key(namespace, key) for key in keys]
