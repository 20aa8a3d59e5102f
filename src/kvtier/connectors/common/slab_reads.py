"""A slab of somebody else's, for the threads of an engine that read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.connectors.common.names import block_key
from kvtier.tiers import Outcome, Pieces, StorageTier

FIND_S = 1.0
READ_S = 10.0
"""What takes longer is not there."""


class SlabReads:
    """Reads of a slab that another process owns.

    Nothing is stored, held or counted as used: the owner is asked the same and does that.
    """

    def __init__(self, tier: StorageTier, digest: Callable[[], bytes]) -> None:
        self._tier = tier
        self._digest = digest

    learns = False
    """Its owner does."""

    def asked(self, keys: Sequence[bytes]) -> None:
        """Do nothing: the slab's owner is told."""

    def num_found(self, keys: Sequence[bytes], num_before: int = 0) -> int:
        are_there = self.find(keys)
        return are_there.index(False) if False in are_there else len(keys)

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        if not (digest := self._digest()):
            return [False] * len(keys)
        return _there(self._tier.find([block_key(digest, key) for key in keys], FIND_S))

    def load(
        self, keys: Sequence[bytes], blocks: Pieces, before: Sequence[bytes] = ()
    ) -> list[bool]:
        if not (digest := self._digest()):
            return [False] * len(keys)
        return _there(self._tier.get([block_key(digest, key) for key in keys], blocks, READ_S))

    def store(
        self, keys: Sequence[bytes], blocks: Pieces, before: Sequence[bytes] = ()
    ) -> list[bool]:
        return [False] * len(keys)

    def observe_prefill(self, num_before: int, num_tokens: int, seconds: float) -> None:
        """Its owner decides what is worth reading."""

    def clear(self) -> None:
        """Do nothing: the slab's owner clears it."""

    def close(self) -> None:
        self._tier.close()


def _there(outcomes: Sequence[Outcome]) -> list[bool]:
    return [outcome is Outcome.THERE for outcome in outcomes]
